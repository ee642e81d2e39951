"""Exact sliding windows for blocks under FlashInfer, the target's and the drafter's.

SGLang plans a verified block's sliding layers without a window: it leaves out the keys that no row of the block
may see, but FlashInfer's kernel then has no mask for those that only its first rows may see, and row j attends to up to
j keys too many (`FlashInferIndicesUpdaterPrefill.update_sliding_window`). Planned with the window, as SGLang does for
prompts, the kernel masks every row by its own position. That limits a row to its left; to its right it sees what
causality leaves it, which in a block is less than a window (`DFlashConfig.check_attention_backend`).
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_dflash.hooks import Hook


def plan_window(
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
):
    """AROUND `FlashInferIndicesUpdaterPrefill.call_begin_forward`, which plans one wrapper of a forward."""
    # The first of two wrappers is that of the sliding layers.
    is_sliding = updater.sliding_window_size is not None and kv_indptr is updater.kv_indptr[0]
    if is_sliding and spec_info is not None and spec_info.spec_input_type == SpecInputType.DFLASH_VERIFY:
        options["window_left"] = updater.sliding_window_size
    return original(
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


FLASHINFER_HOOKS = [
    Hook(
        target="sglang.srt.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
        kind=HookType.AROUND,
        function=plan_window,
        why="row j of a block sees j keys too many in every sliding layer",
        until="update_sliding_window passes its window for speculative forwards too",
    ),
]
