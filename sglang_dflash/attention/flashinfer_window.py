"""How SGLang plans blocks under FlashInfer, the target's and the drafter's: exact windows, and one split of the KV.

SGLang plans a verified block's sliding layers without a window: it leaves out the keys that no row of the block
may see, but FlashInfer's kernel then has no mask for those that only its first rows may see, and row j attends to up to
j keys too many (`FlashInferIndicesUpdaterPrefill.update_sliding_window`). Planned with the window, as SGLang does for
prompts, the kernel masks every row by its own position. That limits a row to its left; to its right it sees what
causality leaves it, which in a block is less than a window (`DFlashConfig.check_attention_backend`).

With `--enable-deterministic-inference` SGLang fixes how FlashInfer splits the KV of prompts and of plain decoding, but
not of blocks. It is not split at all, in graphs (`flashinfer_plan.py`) and without.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_dflash.hooks import Hook

# Of a chunk: no KV is longer.
_UNSPLIT = 2**31 - 1


def plan_blocks(
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
    if spec_info is not None and spec_info.spec_input_type == SpecInputType.DFLASH_VERIFY:
        # The first of two wrappers is that of the sliding layers.
        if updater.sliding_window_size is not None and kv_indptr is updater.kv_indptr[0]:
            options["window_left"] = updater.sliding_window_size
        if updater.attn_backend.enable_deterministic:
            options["fixed_split_size"] = _UNSPLIT
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
        function=plan_blocks,
        why="row j of a block sees j keys too many in every sliding layer, and under deterministic inference too the "
        "split of its KV depends on the batch",
        until="update_sliding_window passes its window for speculative forwards, and update a split size",
    ),
]
