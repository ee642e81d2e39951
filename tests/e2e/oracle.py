"""The batch-1 algorithm on Hugging Face's target, and the comparison of a server's answer with it."""

from __future__ import annotations

import functools
from itertools import accumulate
from pathlib import Path

import torch
from support.oracle.decode import DFlashOutput, dflash_generate
from support.oracle.drafter import ReferenceDrafter
from support.oracle.tree import CANDIDATES
from transformers import AutoModelForCausalLM

from models.tiny import DRAFTER_DIR, TARGET_DIR

EOS = 0
# Difference of log probabilities that the server and this oracle sum in float32 in different orders.
ROUNDING = 1e-4


class Oracle:
    """A cached `dflash_generate` in float32."""

    def __init__(self, drafter: Path = DRAFTER_DIR, target: Path = TARGET_DIR) -> None:
        # One thread, as the servers have.
        torch.set_num_threads(1)
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._drafter = ReferenceDrafter.from_pretrained(drafter, torch.float32)
        self._generate = functools.cache(self._compute)

    @property
    def block_size(self) -> int:
        """The drafter's own block size."""
        return self._drafter.config.block_size

    def generate(
        self,
        input_ids: list[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        block_size: int | None = None,
        draft_window: int | None = None,
        page_size: int = 1,
        num_nodes: int | None = None,
        num_candidates: int = CANDIDATES,
    ) -> DFlashOutput:
        sizes = block_size, draft_window, page_size, num_nodes, num_candidates
        return self._generate(tuple(input_ids), max_new_tokens, ignore_eos, *sizes)

    def _compute(
        self,
        input_ids: tuple[int, ...],
        max_new_tokens: int,
        ignore_eos: bool,
        block_size: int | None,
        draft_window: int | None,
        page_size: int,
        num_nodes: int | None,
        num_candidates: int,
    ) -> DFlashOutput:
        return dflash_generate(
            self._target,
            self._drafter,
            torch.tensor(input_ids),
            max_new_tokens,
            block_size=block_size,
            draft_window=draft_window,
            page_size=page_size,
            stop_token_ids=() if ignore_eos else (EOS,),
            num_nodes=num_nodes,
            num_candidates=num_candidates,
        )


def histogram(accept_lengths: list[int]) -> list[int]:
    """Return the histogram of `meta_info`: entry n counts cycles with n correct drafts, up to the largest n."""
    counts = [0] * max(accept_lengths, default=0)
    for length in accept_lengths:
        counts[length - 1] += 1
    return counts


def answer_lengths(output: DFlashOutput) -> list[int]:
    """Return the length of the answer after the prefill and after every cycle."""
    return [min(length, len(output.tokens)) for length in accumulate([1, *output.accept_lengths])]


def assert_same_cycles(answer: dict, output: DFlashOutput) -> None:
    """Check that a server's answer has the oracle's tokens, and that its cycles accepted the same numbers of tokens.

    Of two paths with about the same probability either may be verified. Then the test needs another prompt.
    """
    meta_info = answer["meta_info"]
    assert answer["output_ids"] == output.tokens
    assert output.margin > ROUNDING, "rounding decides what is accepted"
    assert meta_info.get("spec_verify_ct", 0) == len(output.accept_lengths)
    assert meta_info.get("spec_correct_drafts_histogram", []) == histogram(output.accept_lengths)
