"""Entry point of the group `sglang.srt.plugins`: hooks and attention backend of a machine without a GPU."""

from __future__ import annotations

from sglang_dflash.cpu.platform import cpu_engine


def register() -> None:
    """Register them if SGLang's CPU engine is asked for and there is no CUDA device; otherwise do nothing."""
    if not cpu_engine():
        return
    # Imported here: with a GPU, none of this is wanted.
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash import hooks
    from sglang_dflash.cpu.hooks import CPU_HOOKS
    from sglang_dflash.cpu.torch_native import VerifyTorchNativeAttnBackend

    hooks.register(CPU_HOOKS)
    register_attention_backend("torch_native")(VerifyTorchNativeAttnBackend)
    # It runs request by request, so its result does not depend on the batch.
    add_deterministic_attention_backend_choices(["torch_native"])
