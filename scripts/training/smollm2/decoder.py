"""Rows of text that grow together, one token per step: what is given is read, the rest is chosen."""

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from training import processes
from training.smollm2.llama import Cache, Llama

# Logits [N, vocab] float32 of the tokens at `Rows.position` -> [N] int64.
Choose = Callable[[Tensor], Tensor]


class Rows:
    """N rows of `length` tokens.

    Attributes:
        tokens: [N, length] int64.
        given: [N, length] bool, which of them are there before their step.
        position: [1] int64, the one that is being decided; on the device, for the sake of CUDA graphs.
    """

    def __init__(self, llama: Llama, num_rows: int, length: int):
        self.llama = llama
        self.cache = Cache(llama, num_rows, length)
        self.tokens = torch.zeros(num_rows, length, dtype=torch.long, device=llama.device)
        self.given = torch.zeros(num_rows, length, dtype=torch.bool, device=llama.device)
        self.position = torch.zeros(1, dtype=torch.long, device=llama.device)

    def start(self, first: int) -> None:
        """All rows give at least `first` tokens: read them in one forward, and decide what follows."""
        if first > 1:
            self.llama.prefill(self.tokens[:, : first - 1], self.cache)
        self.position.fill_(first - 1)

    def step(self, choose: Choose) -> None:
        """Decide the token after `position` in every row, and go there."""
        current = self.tokens.index_select(1, self.position)[:, 0]
        logits = self.llama.next_logits(current, self.position, self.cache)
        self.position += 1
        chosen = choose(logits)[:, None]
        there = self.tokens.index_select(1, self.position)
        is_given = self.given.index_select(1, self.position)
        self.tokens.index_copy_(1, self.position, torch.where(is_given, there, chosen))

    def record(self, choose: Choose) -> Callable[[], None]:
        """:meth:`step` as a CUDA graph, to be called again and again; on a CPU, as it is. Leaves disorder."""
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
    """Call `step` so often, with a bar."""
    for _ in tqdm(range(count), desc=name, mininterval=10, disable=processes.rank() != 0):
        step()


def sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature), or take the best where that is 0 (Gumbel's trick, without a division).

    Args:
        logits: [N, vocab] float32; changed.
        temperatures: [N] float32.
    """
    noise = torch.empty_like(logits).exponential_().log_().neg_()
    return logits.addcmul_(noise, temperatures[:, None]).argmax(-1)
