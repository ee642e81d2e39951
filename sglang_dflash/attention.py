"""Exact windows where SGLang's FlashInfer backend verifies a block."""

from __future__ import annotations

from sglang.srt.layers.attention.flashinfer_backend import WrapperDispatch
from sglang.srt.speculative.spec_info import SpecInputType


def plan_exact_window(
    original,
    updater,
    wrapper_ragged,
    wrapper_paged,
    req_pool_indices,
    paged_kernel_lens,
    paged_kernel_lens_sum,
    seq_lens,
    prefix_lens,
    kv_start_idx,
    kv_indptr,
    qo_indptr,
    use_ragged,
    spec_info,
    **options,
) -> None:
    """AROUND `FlashInferIndicesUpdaterPrefill.call_begin_forward`, which plans one wrapper of a forward.

    FlashInfer compiles the window into the kernel that a plan chooses; in a kernel without one, the window that is
    passed when it runs does nothing. SGLang plans the sliding layers of a verification without, and cuts the keys of
    each request to the window of its block's first row instead: row j then sees j keys too many. Planned with the
    window, the kernel masks row by row within those keys, of which no row needs more.
    """
    slides = updater.attn_backend.dispatch_reason == WrapperDispatch.SLIDING_WINDOW
    verifies_block = spec_info is not None and spec_info.spec_input_type == SpecInputType.DFLASH_VERIFY
    # Of the two wrappers of such a model, the first serves the sliding layers.
    if slides and verifies_block and kv_indptr is updater.kv_indptr[0]:
        options["window_left"] = updater.sliding_window_size
    original(
        updater,
        wrapper_ragged,
        wrapper_paged,
        req_pool_indices,
        paged_kernel_lens,
        paged_kernel_lens_sum,
        seq_lens,
        prefix_lens,
        kv_start_idx,
        kv_indptr,
        qo_indptr,
        use_ragged,
        spec_info,
        **options,
    )
