"""Entry point of the group `sglang.srt.plugins`: hooks, linear layers and attention backend for CPUs."""

from __future__ import annotations

from sglang_dflash_cpu.platform import cpu_engine


def register() -> None:
    """Register them if SGLang's CPU engine is asked for and there is no CUDA device; otherwise do nothing."""
    if not cpu_engine():
        return
    # Imported here, as a machine with a GPU needs none of it.
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash import cpu_support, hooks
    from sglang_dflash_cpu import host_pool, packed_linear
    from sglang_dflash_cpu.hooks import CPU_HOOKS
    from sglang_dflash_cpu.torch_native import VerifyTorchNativeAttnBackend

    hooks.register(CPU_HOOKS)
    host_pool.reserve_less()
    cpu_support.provide(packed_linear)
    register_attention_backend("torch_native")(VerifyTorchNativeAttnBackend)
    # It computes one request at a time, so its result does not depend on the batch.
    add_deterministic_attention_backend_choices(["torch_native"])
