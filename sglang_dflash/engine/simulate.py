"""Simulated acceptance, for benchmarks of dummy weights: a fixed length, or the drafts of a recorded drafter.

Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, N verified tokens, K candidates. C answers were
recorded, of L tokens at most, with K' candidates for D positions after each token.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    sample_simulated_acc_len,
)
from sglang.srt.utils.common import async_h2d, log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.draft.head import DraftHead, Table
from sglang_dflash.draft.texts import Copies
from sglang_dflash.errors import ConfigError
from sglang_dflash.types import Acceptance, Block

logger = logging.getLogger(__name__)

# The token that stands for every output in the mode "fixed", as in SGLang's other speculative workers.
_FIXED_TOKEN = 100
# Names a file that `scripts/train_pair.py --stage record` wrote.
RECORDED_DRAFTS = "SGLANG_DFLASH_RECORDED_DRAFTS"
# Tokens after which a request goes on with another recorded answer, so that a short run sees many.
_TOKENS_PER_ANSWER = 64


class Simulation:
    """No simulation. Subclasses replace what a cycle drafts, chooses or accepts, on the GPU and without the host."""

    def begin_requests(self, batch: ScheduleBatch) -> None:
        """Begin the requests of a prefill, or requests that another server has prefilled."""

    def begin_cycle(self, block_size: int) -> None:
        """Prepare the next cycle on the host."""

    def check(self, vocab_size: int, num_drafts: int, num_candidates: int, has_pairs: bool) -> None:
        """Check that a server can be simulated.

        Args:
            vocab_size: of the target.
            num_drafts: W - 1.
            num_candidates: K.
            has_pairs: the drafter scores pairs of drafts.

        Raises:
            ConfigError: it cannot.
        """

    def note_adaptive(self) -> None:
        """Log how far the simulation stands for a drafter if the draft length adapts."""

    def head(self, head: DraftHead) -> DraftHead | RecordedHead:
        """Return a head that drafts in place of the drafter's `head`."""
        return head

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return the target's token after every verified token, in place of `tokens`, and end the cycle.

        Args:
            tokens: [bs * N] int64.
            positions: [bs * N] int64. Of the verified tokens.
            seq_lens, req_pool_indices: [bs] int64.
        """
        return tokens

    def accept(self, accepted: Acceptance, block_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
        """Return what a cycle accepts in place of `accepted`.

        Args:
            accepted: the result, whose shape stays.
            block_tokens: [bs, W] int64. The verified tokens.
            seq_lens: [bs] int64.
        """
        return accepted

    def set_paths(self, paths: torch.Tensor) -> None:
        """Change the accepted paths of trees, [bs, W] int64, to what :meth:`accept` returned."""


class FixedLength(Simulation):
    """`SGLANG_SIMULATE_ACC_LEN`: acceptance forced to a length.

    The length is in GPU memory, so that a CUDA graph can read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._length = torch.ones(1, dtype=torch.int64, device=device)

    @classmethod
    def from_environment(cls, device: torch.device) -> FixedLength:
        """Return the simulation that SGLang's variables ask for.

        Raises:
            ConfigError: a variable has an unknown value.
        """
        if not math.isfinite(SIMULATE_ACC_LEN):
            raise ConfigError(f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN}: expected a number.")
        choices = {
            "SGLANG_SIMULATE_ACC_METHOD": (SIMULATE_ACC_METHOD, ("match-expected", "multinomial")),
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": (SIMULATE_ACC_TOKEN_MODE, ("fixed", "real-draft-token")),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ConfigError(f"{name}={value!r}: expected {' or '.join(map(repr, known))}.")
        return cls(device)

    def note_adaptive(self) -> None:
        log_info_on_rank0(
            logger,
            "SGLANG_SIMULATE_ACC_LEN accepts as many drafts however few are verified, which flatters short drafts; "
            "--speculative-adaptive-config fixed always verifies as many.",
        )

    def begin_cycle(self, block_size: int) -> None:
        self._length.fill_(sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, block_size))

    def accept(self, accepted: Acceptance, block_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
        bs, width = accepted.out_tokens.shape
        length = self._length.clamp(max=width)
        simulated = Acceptance.empty(bs, width, seq_lens.device)
        simulated.packed.fill_(_FIXED_TOKEN)
        if SIMULATE_ACC_TOKEN_MODE == "real-draft-token":
            simulated.out_tokens[:, :-1] = block_tokens[:, 1:]
            simulated.bonus_tokens.copy_(simulated.out_tokens.index_select(1, length - 1)[:, 0])
        simulated.accept_lens.copy_(length.expand(bs))
        torch.add(seq_lens, length, out=simulated.new_seq_lens)
        return simulated

    def set_paths(self, paths: torch.Tensor) -> None:
        paths.copy_(torch.arange(paths.shape[1], device=paths.device))


class RecordedDrafts(Simulation):
    """`SGLANG_DFLASH_RECORDED_DRAFTS`: the drafts of a real drafter for the greedy answers of a real target.

    A request writes recorded answers and gets the candidates that were drafted there. What the drafts accept then
    depends on the size and the shape of a tree as it does for the real pair, for easy and for hard texts. The answer
    follows from the request's prompt and its length when a cycle begins, so that engines that are compared write the
    same text, apart from the cycles in which an answer changes or ends. Only greedy requests are simulated, and
    drafters without scores of pairs.
    """

    def __init__(self, file: Path, num_slots: int, device: torch.device) -> None:
        """
        Args:
            num_slots: rows of `req_to_token`, or more.
            file: safetensors with
                answers: [C, L + D + 1] int32. Tokens of the answers; -1 after the end.
                num_tokens: [C] int64. Tokens at which drafts were recorded, at most L.
                candidates: [C, L, D, K'] uint16. The most probable first.
                sixteenths: [C, L, D, K'] uint8. Minus 16 times their log probabilities, in nats.
            device: of the server.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            with safe_open(file, "pt") as records:
                read = {name: records.get_tensor(name) for name in records.keys()}  # noqa: SIM118 (not a dictionary)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{RECORDED_DRAFTS}={file}: {error}") from error
        expected = {"answers", "num_tokens", "candidates", "sixteenths"}
        if set(read) != expected:
            raise ConfigError(f"{RECORDED_DRAFTS}={file}: has {sorted(read)}, expected {sorted(expected)}.")
        self._file = file
        self._answers = read["answers"].to(device, torch.int64)
        self._num_tokens = read["num_tokens"].to(device)
        self._candidates = read["candidates"].to(torch.int64).flatten(0, 1).to(device)
        self._log_probs = read["sixteenths"].to(device, torch.float32).flatten(0, 1) / -16
        # The answer with which each slot's request begins.
        self._first_answers = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def begin_requests(self, batch: ScheduleBatch) -> None:
        prompts = (np.asarray(req.origin_input_ids, dtype=np.int64) for req in batch.reqs)
        firsts = [zlib.crc32(prompt) % len(self._num_tokens) for prompt in prompts]
        device = self._first_answers.device
        self._first_answers[batch.req_pool_indices] = async_h2d(firsts, dtype=torch.int64, device=device)

    def check(self, vocab_size: int, num_drafts: int, num_candidates: int, has_pairs: bool) -> None:
        if has_pairs:
            raise ConfigError(f"{RECORDED_DRAFTS}={self._file}: not for drafters that score pairs of drafts.")
        _, drafts, candidates = self._candidates.shape
        largest = max(int(self._answers.max()), int(self._candidates.max()))
        for name, asked, recorded in (
            ("drafts per block", num_drafts, drafts),
            ("candidates", num_candidates, candidates),
            ("token", largest, vocab_size - 1),
        ):
            if asked > recorded:
                raise ConfigError(f"{RECORDED_DRAFTS}={self._file}: {name} {asked} is above {recorded}.")

    def head(self, head: DraftHead) -> RecordedHead:
        return RecordedHead(head, self)

    def drafts(self, block: Block, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the recorded candidates of blocks and their log probabilities, [bs, W - 1, K] int64 and float32."""
        answer, at = self._answer_and_token(block.seq_lens, block.req_pool_indices)
        place = answer * (len(self._candidates) // len(self._num_tokens)) + at
        num_drafts = block.input_ids.shape[0] // block.seq_lens.shape[0] - 1
        part = place, slice(num_drafts), slice(num_candidates)
        return self._candidates[part], self._log_probs[part]

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> torch.Tensor:
        answer, at = self._answer_and_token(seq_lens, req_pool_indices)
        depths = positions.view(len(seq_lens), -1) - seq_lens[:, None]
        chosen = self._answers[answer[:, None], at[:, None] + 1 + depths].clamp(min=0)
        return chosen.view(-1)

    def _answer_and_token(
        self, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which answer each request writes, and the index of the bonus token in it, [bs] int64 each."""
        turn = self._first_answers[req_pool_indices] + seq_lens // _TOKENS_PER_ANSWER
        answer = turn % len(self._num_tokens)
        return answer, seq_lens % self._num_tokens[answer]


class RecordedHead:
    """Draft head that takes as long as another one, and drafts what was recorded. See :class:`DraftHead`.

    Attributes:
        num_candidates: K.
    """

    def __init__(self, head: DraftHead, recorded: RecordedDrafts) -> None:
        self.num_candidates = head.num_candidates
        self._head, self._recorded = head, recorded

    def table(
        self,
        hidden_states: torch.Tensor,
        block: Block,
        bigram_tables: torch.Tensor,
        texts: torch.Tensor | None = None,
    ) -> Table:
        self._head.candidates(hidden_states, block.seq_lens.shape[0])
        candidates, log_probs = self._recorded.drafts(block, self.num_candidates)
        copies = Copies.place(texts, block, candidates, log_probs)
        of_requests = (block.parameters, block.keys, bigram_tables, block.is_chain, block.seq_lens)
        log_sums = torch.zeros_like(log_probs[..., 0])
        of_requests += (block.req_pool_indices, copies.places, copies.lens)
        return candidates, *ops.fill_table(candidates, log_probs, log_sums, *of_requests)


def simulation(num_slots: int, device: torch.device) -> Simulation:
    """Return the simulation that the environment asks for.

    Args:
        num_slots: rows of `req_to_token`, or more.
        device: of the server.

    Raises:
        ConfigError: a variable has an unknown value, or two simulations are asked for.
    """
    file = os.environ.get(RECORDED_DRAFTS)
    # NaN asks for a length, too.
    if not SIMULATE_ACC_LEN <= 0:
        if file:
            raise ConfigError(f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN} and {RECORDED_DRAFTS}={file}: unset one.")
        return FixedLength.from_environment(device)
    return RecordedDrafts(Path(file), num_slots, device) if file else Simulation()
