"""Rows of text that grow together by one token per step. Given tokens are read, other tokens are chosen."""

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from training import processes
from training.smollm2.llama import Cache, Llama

# Takes logits [rows, V] float32 of the tokens at `Rows.position`, returns tokens [rows] int64.
Choose = Callable[[Tensor], Tensor]


class Rows:
    """Rows of `length` tokens each.

    Attributes:
        tokens: [rows, length] int64.
        given: [rows, length] bool. Tokens that are known before their step.
        position: [1] int64. The position to decide next; on the device, for CUDA graphs.
    """

    def __init__(self, llama: Llama, num_rows: int, length: int):
        self.llama = llama
        self.cache = Cache(llama, num_rows, length)
        self.tokens = torch.zeros(num_rows, length, dtype=torch.long, device=llama.device)
        self.given = torch.zeros(num_rows, length, dtype=torch.bool, device=llama.device)
        self.position = torch.zeros(1, dtype=torch.long, device=llama.device)

    def start(self, first: int) -> None:
        """Read the first `first` tokens, which all rows give, in one forward; then the token after them is decided."""
        if first > 1:
            self.llama.prefill(self.tokens[:, : first - 1], self.cache)
        self.position.fill_(first - 1)

    def step(self, choose: Choose) -> None:
        """Decide the token after `position` in every row, and move to it."""
        current = self.tokens.index_select(1, self.position)[:, 0]
        logits = self.llama.next_logits(current, self.position, self.cache)
        self.position += 1
        chosen = choose(logits)[:, None]
        there = self.tokens.index_select(1, self.position)
        is_given = self.given.index_select(1, self.position)
        self.tokens.index_copy_(1, self.position, torch.where(is_given, there, chosen))

    def record(self, choose: Choose) -> Callable[[], None]:
        """Return :meth:`step` as a CUDA graph to call repeatedly; on a CPU, the method. It overwrites the rows."""
        if self.llama.device.type == "cpu":
            return lambda: self.step(choose)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(choose)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(choose)
        return graph.replay


def run_steps(step: Callable[[], None], count: int, name: str) -> None:
    """Call `step` `count` times, with a progress bar."""
    for _ in tqdm(range(count), desc=name, mininterval=10, disable=processes.rank() != 0):
        step()


def sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature), or take the argmax if the temperature is 0.

    It uses Gumbel's trick, which needs no division.

    Args:
        logits: [rows, V] float32; changed.
        temperatures: [rows] float32.
    """
    noise = torch.empty_like(logits).exponential_().log_().neg_()
    return logits.addcmul_(noise, temperatures[:, None]).argmax(-1)
