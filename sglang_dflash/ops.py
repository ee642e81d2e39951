"""The operations of a decode cycle: Triton kernels on a GPU, their torch twins elsewhere."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    from sglang_dflash.kernels.accept_prefix import accept_prefix
    from sglang_dflash.kernels.apply_penalties import apply_penalties
    from sglang_dflash.kernels.gather_window import gather_window
    from sglang_dflash.kernels.prepare_block import prepare_block
    from sglang_dflash.kernels.write_context_kv import write_context_kv
else:
    from sglang_dflash.reference.accept_prefix import accept_prefix
    from sglang_dflash.reference.apply_penalties import apply_penalties
    from sglang_dflash.reference.gather_window import gather_window
    from sglang_dflash.reference.prepare_block import prepare_block
    from sglang_dflash.reference.write_context_kv import write_context_kv

__all__ = ["accept_prefix", "apply_penalties", "gather_window", "prepare_block", "write_context_kv"]
