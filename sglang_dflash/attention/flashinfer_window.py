"""Corrections of SGLang's FlashInfer plans of blocks: exact windows, and KV that is not split.

SGLang plans the sliding layers of a verified block without a window. It leaves out the keys that no row may see, but
FlashInfer then has no mask for keys that only the first rows may see: row j attends to up to j keys too many
(`FlashInferIndicesUpdaterPrefill.update_sliding_window`). Planned with the window, as SGLang does for prompts, the
kernel masks every row by its own position. The window limits a row to its left. To its right causality limits it, and
a block is narrower than a window there (`DFlashConfig.check_attention_backend`).

With `--enable-deterministic-inference` SGLang fixes how FlashInfer splits the KV of prompts and of plain decoding, but
not of blocks. Here the KV of blocks is not split, in graphs (`flashinfer_plan.py`) and without.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_dflash.hooks import Hook

# Keys of a chunk: no KV is longer.
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
