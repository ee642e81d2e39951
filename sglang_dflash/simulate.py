"""`SGLANG_SIMULATE_ACC_LEN`: acceptance forced to a length, for benchmarks of dummy weights."""

from __future__ import annotations

import torch
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    _sample_simulated_acc_len,
)

from sglang_dflash.accept import Acceptance
from sglang_dflash.config import ConfigError

SIMULATED = SIMULATE_ACC_LEN > 0

# The token that stands for every output in the mode "fixed", as in SGLang's other speculative workers.
_FIXED_TOKEN = 100

if SIMULATED and SIMULATE_ACC_TOKEN_MODE not in ("fixed", "real-draft-token"):
    raise ConfigError(
        f"SGLANG_SIMULATE_ACC_TOKEN_MODE={SIMULATE_ACC_TOKEN_MODE!r}: expected 'fixed' or 'real-draft-token'."
    )


def simulate_acceptance(accepted: Acceptance, block_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
    """What the cycle would have returned, had the target accepted the simulated length in every request.

    Args:
        accepted: the real decision; gives shapes and, for "real-draft-token", nothing else.
        block_tokens: [bs, B], the verified rows.
        seq_lens: [bs].
    """
    bs, block_size = accepted.out_tokens.shape
    length = _sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, block_size)
    simulated = Acceptance.empty(bs, block_size, seq_lens.device)
    simulated.packed.fill_(_FIXED_TOKEN)
    if SIMULATE_ACC_TOKEN_MODE == "real-draft-token":
        simulated.out_tokens[:, :-1] = block_tokens[:, 1:]
        simulated.bonus_tokens.copy_(simulated.out_tokens[:, length - 1])
    simulated.accept_lens.fill_(length)
    torch.add(seq_lens, length, out=simulated.new_seq_lens)
    return simulated
