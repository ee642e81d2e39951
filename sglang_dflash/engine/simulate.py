"""`SGLANG_SIMULATE_ACC_LEN`: acceptance forced to a length, for benchmarks of dummy weights."""

from __future__ import annotations

import math

import torch
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    sample_simulated_acc_len,
)

from sglang_dflash.errors import ConfigError
from sglang_dflash.types import Acceptance

# The token that stands for every output in the mode "fixed", as in SGLang's other speculative workers.
_FIXED_TOKEN = 100


class SimulatedAcceptance:
    """Replacement for what a cycle accepted. Its length is in GPU memory, so that a CUDA graph can read it."""

    def __init__(self, device: torch.device) -> None:
        self._length = torch.ones(1, dtype=torch.int64, device=device)

    @classmethod
    def from_environment(cls, device: torch.device) -> SimulatedAcceptance | None:
        """Return the simulation that the environment asks for; None: none.

        Raises:
            ConfigError: a variable has an unknown value.
        """
        if SIMULATE_ACC_LEN <= 0:
            return None
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

    def draw(self, block_size: int) -> None:
        """Choose the length of the next cycle."""
        self._length.fill_(sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, block_size))

    def __call__(self, accepted: Acceptance, block_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
        """Return the result of a cycle in which the target accepts the simulated length in every request.

        Args:
            accepted: the real result, for its shape.
            block_tokens: [bs, W] int64, the verified tokens.
            seq_lens: [bs] int64.
        """
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
