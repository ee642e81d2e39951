"""Bigram tables and texts of running requests are those of their tokens, in every order of events."""

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
from sglang_dflash.draft.texts import Texts
from sglang_dflash.ops.bigrams import TABLE_SIZE, locate, tables_of
from sglang_dflash.ops.copies import NO_TOKEN, TEXT_SIZE
from sglang_dflash.types import Acceptance

WIDTH = 5
# Some prompts have tokens beyond it, as images do.
VOCAB = 290
DRAW = random.Random(0)


def draw(length: int, high: int = VOCAB) -> list[int]:
    return [DRAW.randrange(high) for _ in range(length)]


def draw_prompt(length: int) -> list[int]:
    return draw(length, VOCAB + 10)


class Served:
    """Requests in their own slots. The scheduler sees their output one cycle late."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.reqs = [Req(str(i), "", array("q", p), SamplingParams()) for i, p in enumerate(prompts)]
        self.texts = [list(prompt) for prompt in prompts]
        self.bigrams = Bigrams(len(prompts) + 1, "cpu")
        self.copied = Texts(len(prompts) + 1, VOCAB, "cpu")

    def prefill(self, places: list[int], decoding: tuple[int, ...] = ()) -> None:
        """Prefill the whole texts of some requests, and one token of the decoding ones. Each gets one new token."""
        batch = ScheduleBatch(reqs=[self.reqs[i] for i in (*places, *decoding)], device="cpu")
        batch.decoding_reqs = [self.reqs[i] for i in decoding]
        parts = [*(self.texts[i] for i in places), *([self.texts[i][-1]] for i in decoding)]
        batch.input_ids = torch.tensor(sum(parts, []))
        batch.req_pool_indices = 1 + torch.tensor([*places, *decoding])
        batch.extend_lens = [len(part) for part in parts]
        batch.seq_lens = torch.tensor([len(self.texts[i]) for i in (*places, *decoding)])
        written = draw(len(parts))
        for state in (self.bigrams, self.copied):
            state.begin(batch, torch.tensor(written, dtype=torch.int32))
        for i, token in zip((*places, *decoding), written, strict=True):
            self.texts[i].append(token)

    def cycle(self, places: list[int], fallback: tuple[int, ...] = ()) -> None:
        """Run a cycle. For the `fallback` requests SGLang's sampler decides after the graph, and differs from it."""
        rows = 1 + torch.tensor(places)
        bonus = torch.tensor([self.texts[i][-1] for i in places])
        seq_lens = torch.tensor([len(self.texts[i]) - 1 for i in places])
        by_graph, decided = (Acceptance.empty(len(places), WIDTH, "cpu") for _ in range(2))
        is_chain = torch.tensor([int(i in fallback) for i in places])
        for accepted in (by_graph, decided):
            accepted.out_tokens.copy_(torch.tensor([draw(WIDTH) for _ in places]))
            accepted.accept_lens.copy_(torch.randint(1, WIDTH + 1, (len(places),)))
        self.bigrams.add(rows, bonus, by_graph, is_chain, self.copied, seq_lens)
        index = is_chain.nonzero()[:, 0]
        again = Acceptance.empty(len(index), WIDTH, "cpu")
        again.out_tokens.copy_(decided.out_tokens[index])
        again.accept_lens.copy_(decided.accept_lens[index])
        self.bigrams.add(rows[index], bonus[index], again, None, self.copied, seq_lens[index])
        for place, i in enumerate(places):
            accepted = decided if i in fallback else by_graph
            self.texts[i] += accepted.out_tokens[place, : accepted.accept_lens[place]].tolist()

    def assert_known(self, places: list[int]) -> None:
        for i in places:
            text = self.texts[i][-TABLE_SIZE:]
            expected = tables_of(torch.tensor([text]), torch.tensor([len(text)]))[0]
            assert torch.equal(self.bigrams.tables[1 + i], expected), i
            assert self.copied_text(i) == [token if token < VOCAB else NO_TOKEN for token in self.texts[i]], i

    def copied_text(self, i: int) -> list[int]:
        """Return the part of a request's text that its copies come from."""
        length = len(self.texts[i])
        return self.copied.tokens[1 + i, torch.arange(max(0, length - TEXT_SIZE), length) % TEXT_SIZE].tolist()


def test_tables_are_those_of_the_texts():
    torch.manual_seed(0)
    served = Served([draw_prompt(40), draw_prompt(1), draw_prompt(3)])
    served.prefill([0, 1])
    served.assert_known([0, 1])
    for _ in range(8):
        served.cycle([0, 1], fallback=(1,))
    served.prefill([2], decoding=(1, 0))
    served.cycle([2, 0, 1])
    served.assert_known([0, 1, 2])

    # A retracted request starts again, in a slot that another request has used meanwhile.
    served.bigrams.tables[1], served.copied.tokens[1] = 7, 7
    served.reqs[0].output_ids.extend(served.texts[0][len(served.reqs[0].origin_input_ids) :])
    served.prefill([0], decoding=(2,))
    served.cycle([1, 0, 2], fallback=(0, 2))
    served.assert_known([0, 1, 2])


def test_the_end_of_a_long_prompt_is_known():
    served = Served([draw_prompt(3 * TABLE_SIZE)])
    served.prefill([0])
    end = torch.tensor(served.texts[0][-200:])
    places, tags = locate(end[:-1], end[1:])
    newest = torch.stack([(places[i + 1 :] != place).all() for i, place in enumerate(places)])
    assert torch.equal(served.bigrams.tables[1, places[newest]], tags[newest])
    assert len(served.bigrams.tables[1].unique()) > TABLE_SIZE / 2


def test_the_end_of_a_text_is_kept_beyond_the_ring():
    served = Served([draw_prompt(TEXT_SIZE + 100)])
    served.prefill([0])
    for _ in range(40):
        served.cycle([0])
    assert served.copied_text(0) == [token if token < VOCAB else NO_TOKEN for token in served.texts[0][-TEXT_SIZE:]]
    assert NO_TOKEN in served.copied_text(0)


def test_transferred_requests_begin_with_their_first_token():
    served = Served([draw_prompt(30), draw_prompt(50)])
    served.copied.tokens.fill_(7)
    for i, text in enumerate(served.texts):
        text += draw(1 + i)
        served.reqs[i].output_ids.extend(text[len(served.reqs[i].origin_input_ids) :])
    batch = ScheduleBatch(reqs=served.reqs, device="cpu")
    batch.req_pool_indices = torch.tensor([1, 2])
    for state in (served.bigrams, served.copied):
        state.begin_transferred(batch)
    served.assert_known([0, 1])
    served.cycle([0, 1])
    served.assert_known([0, 1])
