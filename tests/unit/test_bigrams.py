"""Bigram tables of running requests equal the tables of their texts, in every order of events."""

import random
from array import array

import pytest
import torch

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

import sglang.srt.utils  # noqa: F401  (SGLang's import order: utils before the layers)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.draft.bigrams import Bigrams
from sglang_dflash.ops.bigrams import TABLE_SIZE, locate, tables_of
from sglang_dflash.types import Acceptance

WIDTH = 5
DRAW = random.Random(0)


def draw(length: int) -> list[int]:
    return [DRAW.randrange(300) for _ in range(length)]


class Served:
    """Requests in their own slots. The scheduler sees their output one cycle late."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.reqs = [Req(str(i), "", array("q", p), SamplingParams()) for i, p in enumerate(prompts)]
        self.texts = [list(prompt) for prompt in prompts]
        self.bigrams = Bigrams(len(prompts) + 1, "cpu")

    def prefill(self, places: list[int], decoding: tuple[int, ...] = ()) -> None:
        """Prefill the whole texts of some requests, and one token of the decoding ones. Each gets one new token."""
        batch = ScheduleBatch(reqs=[self.reqs[i] for i in (*places, *decoding)], device="cpu")
        batch.decoding_reqs = [self.reqs[i] for i in decoding]
        parts = [*(self.texts[i] for i in places), *([self.texts[i][-1]] for i in decoding)]
        batch.input_ids = torch.tensor(sum(parts, []))
        batch.req_pool_indices = 1 + torch.tensor([*places, *decoding])
        batch.extend_lens = [len(part) for part in parts]
        written = draw(len(parts))
        self.bigrams.begin(batch, torch.tensor(written, dtype=torch.int32))
        for i, token in zip((*places, *decoding), written, strict=True):
            self.texts[i].append(token)

    def cycle(self, places: list[int], fallback: tuple[int, ...] = ()) -> None:
        """Run a cycle. For the `fallback` requests SGLang's sampler decides after the graph, and differs from it."""
        rows = 1 + torch.tensor(places)
        bonus = torch.tensor([self.texts[i][-1] for i in places])
        by_graph, decided = (Acceptance.empty(len(places), WIDTH, "cpu") for _ in range(2))
        is_chain = torch.tensor([int(i in fallback) for i in places])
        for accepted in (by_graph, decided):
            accepted.out_tokens.copy_(torch.tensor([draw(WIDTH) for _ in places]))
            accepted.accept_lens.copy_(torch.randint(1, WIDTH + 1, (len(places),)))
        self.bigrams.add(rows, bonus, by_graph, is_chain)
        index = is_chain.nonzero()[:, 0]
        again = Acceptance.empty(len(index), WIDTH, "cpu")
        again.out_tokens.copy_(decided.out_tokens[index])
        again.accept_lens.copy_(decided.accept_lens[index])
        self.bigrams.add(rows[index], bonus[index], again)
        for place, i in enumerate(places):
            accepted = decided if i in fallback else by_graph
            self.texts[i] += accepted.out_tokens[place, : accepted.accept_lens[place]].tolist()

    def assert_known(self, places: list[int]) -> None:
        for i in places:
            text = self.texts[i][-TABLE_SIZE:]
            expected = tables_of(torch.tensor([text]), torch.tensor([len(text)]))[0]
            assert torch.equal(self.bigrams.tables[1 + i], expected), i


def test_tables_are_those_of_the_texts():
    torch.manual_seed(0)
    served = Served([draw(40), draw(1), draw(3)])
    served.prefill([0, 1])
    served.assert_known([0, 1])
    for _ in range(8):
        served.cycle([0, 1], fallback=(1,))
    served.prefill([2], decoding=(1, 0))
    served.cycle([2, 0, 1])
    served.assert_known([0, 1, 2])

    # A retracted request starts again, in a slot that another request has used meanwhile.
    served.bigrams.tables[1] = 7
    served.reqs[0].output_ids.extend(served.texts[0][len(served.reqs[0].origin_input_ids) :])
    served.prefill([0], decoding=(2,))
    served.cycle([1, 0, 2], fallback=(0, 2))
    served.assert_known([0, 1, 2])


def test_the_end_of_a_long_prompt_is_known():
    served = Served([draw(3 * TABLE_SIZE)])
    served.prefill([0])
    end = torch.tensor(served.texts[0][-200:])
    places, tags = locate(end[:-1], end[1:])
    newest = torch.stack([(places[i + 1 :] != place).all() for i, place in enumerate(places)])
    assert torch.equal(served.bigrams.tables[1, places[newest]], tags[newest])
    assert len(served.bigrams.tables[1].unique()) > TABLE_SIZE / 2
