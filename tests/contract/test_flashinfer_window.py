"""SGLang plans FlashInfer's sliding layers without a window for blocks, and with it under this package's hook.

Runs SGLang's own `update_sliding_window` up to the call that the hook wraps; `tests/gpu/test_masks.py` runs kernels.
"""

from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill

from sglang_dflash.flashinfer_window import plan_window
from sglang_dflash.info import DFlashVerifyInput

WINDOW_LEFT = 63
BEGIN_FORWARD = signature(FlashInferIndicesUpdaterPrefill.call_begin_forward)
BLOCK = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=16)


def planned_windows(spec_info, hooked: bool) -> list[int]:
    """`window_left` of the sliding and of the full layers' plan."""
    seen, slots = [], object()

    def plan(*arguments, **options):
        call = BEGIN_FORWARD.bind(*arguments, **options).arguments
        assert call["plan"] is slots
        seen.append(call.get("window_left", -1))

    updater = SimpleNamespace(
        sliding_window_size=WINDOW_LEFT,
        kv_indptr=[torch.zeros(3), torch.zeros(3)],
        qo_indptr=[torch.zeros(3), torch.zeros(3)],
        prefill_wrapper_ragged=None,
        _swa_kv_pool=None,
    )
    updater.call_begin_forward = partial(plan_window, plan, updater) if hooked else partial(plan, updater)
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
    assert planned_windows(BLOCK, hooked) == [WINDOW_LEFT if hooked else -1, -1]


@pytest.mark.parametrize("hooked", [False, True])
def test_prompts_are_planned_as_before(hooked):
    assert planned_windows(None, hooked) == [WINDOW_LEFT, -1]
