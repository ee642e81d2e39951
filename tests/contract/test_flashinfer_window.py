"""This package's hook adds what SGLang leaves out of FlashInfer's plans of blocks.

The tests run SGLang's own `update_sliding_window` up to the hooked call. `tests/gpu/test_masks.py` runs the kernels.
"""

from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill

from sglang_dflash.attention.flashinfer_window import plan_blocks
from sglang_dflash.attention.verify_input import DFlashVerifyInput

WINDOW_LEFT = 63
BEGIN_FORWARD = signature(FlashInferIndicesUpdaterPrefill.call_begin_forward)
BLOCK = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=16)


def planned(spec_info, hooked: bool, deterministic: bool = False) -> list[tuple[int, int | None]]:
    """Return `window_left` and `fixed_split_size` of the sliding layers' plan and of the full layers' plan."""
    seen, slots = [], object()

    def plan(*arguments, **options):
        call = BEGIN_FORWARD.bind(*arguments, **options).arguments
        assert call["plan"] is slots
        options = {"window_left": -1, "fixed_split_size": None} | call
        seen.append((options["window_left"], options["fixed_split_size"]))

    updater = SimpleNamespace(
        sliding_window_size=WINDOW_LEFT,
        kv_indptr=[torch.zeros(3), torch.zeros(3)],
        qo_indptr=[torch.zeros(3), torch.zeros(3)],
        prefill_wrapper_ragged=None,
        _swa_kv_pool=None,
        attn_backend=SimpleNamespace(enable_deterministic=deterministic),
    )
    updater.call_begin_forward = partial(plan_blocks, plan, updater) if hooked else partial(plan, updater)
    lens = torch.tensor([100, 40])
    FlashInferIndicesUpdaterPrefill.update_sliding_window(
        updater,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=140,
        prefix_lens=None if spec_info is not None else lens - 10,
        prefill_wrappers=[None, None],
        use_ragged=False,
        encoder_lens=None,
        spec_info=spec_info,
        plan=slots,
    )
    return seen


@pytest.mark.parametrize("hooked", [False, True])
def test_blocks(hooked):
    """SGLang plans sliding layers without a window for blocks; the hook adds it."""
    assert planned(BLOCK, hooked) == [(WINDOW_LEFT if hooked else -1, None), (-1, None)]


@pytest.mark.parametrize("hooked", [False, True])
def test_deterministic_blocks(hooked):
    """SGLang lets FlashInfer split the KV by the lengths of the batch; the hook fixes the split size."""
    split = 2**31 - 1 if hooked else None
    assert planned(BLOCK, hooked, deterministic=True) == [(WINDOW_LEFT if hooked else -1, split), (-1, split)]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_are_planned_as_before(hooked, deterministic):
    assert planned(None, hooked, deterministic) == [(WINDOW_LEFT, None), (-1, None)]
