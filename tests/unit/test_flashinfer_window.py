"""With which window a FlashInfer forward is planned. FlashInfer itself needs a GPU: see tests/gpu."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import WrapperDispatch
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_dflash.attention import plan_exact_window

VERIFY = SimpleNamespace(spec_input_type=SpecInputType.DFLASH_VERIFY)
EAGLE = SimpleNamespace(spec_input_type=SpecInputType.EAGLE_VERIFY)


@pytest.mark.parametrize(
    ("dispatch_reason", "spec_info", "wrapper", "window_left"),
    [
        (WrapperDispatch.SLIDING_WINDOW, VERIFY, 0, 127),
        # The full layers, another algorithm, a prefill (which SGLang plans with its own window) and other models.
        (WrapperDispatch.SLIDING_WINDOW, VERIFY, 1, -1),
        (WrapperDispatch.SLIDING_WINDOW, EAGLE, 0, -1),
        (WrapperDispatch.SLIDING_WINDOW, None, 0, 99),
        (None, VERIFY, 0, -1),
    ],
)
def test_window_of_the_plan(dispatch_reason, spec_info, wrapper, window_left):
    kv_indptr = [torch.zeros(3), torch.zeros(3)]
    updater = SimpleNamespace(
        attn_backend=SimpleNamespace(dispatch_reason=dispatch_reason), kv_indptr=kv_indptr, sliding_window_size=127
    )
    planned = []

    def call_begin_forward(*args, **options):
        planned.append((args, options))

    arguments = [f"argument {i}" for i in range(8)] + [kv_indptr[wrapper], "qo_indptr", False, spec_info]
    options = {"use_sliding_window_kv_pool": True, "window_left": 99 if spec_info is None else -1}
    plan_exact_window(call_begin_forward, updater, *arguments, **options)

    [(args, options)] = planned
    assert args == (updater, *arguments)
    assert options == {"use_sliding_window_kv_pool": True, "window_left": window_left}
