"""Attention backends of the drafter: which ones a device has, and which one serves."""

from __future__ import annotations

import logging

from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view
from sglang.srt.runtime_context import get_platform
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import ConfigError

logger = logging.getLogger(__name__)

# By device type.
DRAFT_BACKENDS = {"cuda": ("fa3", "flashinfer", "triton"), "cpu": ("torch_native", "triton")}
# Backends that SGLang chooses for targets on Blackwell GPUs, without an attention of blocks for drafters.
TARGET_BACKENDS = ("trtllm_mha", "trtllm_mla", "fa4")
# Every CUDA GPU has it, and it assumes nothing of head sizes, masks or pages.
_ANY_GPU = "triton"


def device_type(server_args: ServerArgs) -> str:
    """Return the device without its number: "cuda" or "cpu"."""
    return resolving_view(server_args).device.split(":")[0]


def draft_attention_backends(server_args: ServerArgs) -> tuple[str, ...]:
    """Return the attention backends that this machine has for a drafter.

    Raises:
        ConfigError: DFLASH does not run on the device.
    """
    device = device_type(server_args)
    if device not in DRAFT_BACKENDS:
        raise ConfigError(f"--device {device}: DFLASH runs on {' and '.join(DRAFT_BACKENDS)}.")
    has = {
        # As SGLang asserts when it builds the backend (`attention_registry.create_flashattention_v3_backend`).
        "fa3": get_platform().device_capability[0] in (8, 9),
        "flashinfer": get_platform().has_flashinfer,
    }
    return tuple(backend for backend in DRAFT_BACKENDS[device] if has.get(backend, True))


def draft_attention_backend(server_args: ServerArgs, choices: tuple[str, ...]) -> str:
    """Return the drafter's attention backend: its own flag, else the target's decode backend.

    Where the target has a backend without an attention of blocks, the drafter gets one that every GPU has.

    Args:
        choices: the backends that this machine has for a drafter.

    Raises:
        ConfigError: naming the flag and its value.
    """
    cfg = resolving_view(server_args)
    _, target_backend = attention_backends_of(cfg)
    backend = cfg.speculative_draft_attention_backend or target_backend
    if cfg.speculative_draft_attention_backend is None and backend in TARGET_BACKENDS and _ANY_GPU in choices:
        logger.info(
            "DFLASH's drafter runs on %s: it has no attention on %s, the target's. "
            "--speculative-draft-attention-backend names another.",
            _ANY_GPU,
            backend,
        )
        backend = _ANY_GPU
    if backend not in choices:
        # In the order in which they count. If none of them is given, SGLang has chosen.
        flags = ("speculative_draft_attention_backend", "decode_attention_backend", "attention_backend")
        given = [f"--{name.replace('_', '-')} {backend}" for name in flags if getattr(server_args, name) == backend]
        subject = given[0] if given else f"{backend}, the target's attention backend by default"
        raise ConfigError(
            f"{subject}: DFLASH's drafter runs on {', '.join(choices)} on {_machine(server_args)}; choose one of them "
            "with --speculative-draft-attention-backend."
        )
    own_dtype = cfg.speculative_draft_kv_cache_dtype
    if backend == "fa3" and (own_dtype or cfg.kv_cache_dtype) == "fp8_e5m2":
        # SGLang moves a target to another backend, and leaves the drafter's where the flag puts it.
        able = " or ".join(choice for choice in choices if choice != "fa3")
        flag = "--speculative-draft-kv-cache-dtype" if own_dtype else "--kv-cache-dtype"
        raise ConfigError(
            f"{flag} fp8_e5m2: FA3 reads no fp8 KV but fp8_e4m3, and the drafter's KV would be in it; set "
            f"--speculative-draft-attention-backend {able}, or another --speculative-draft-kv-cache-dtype."
        )
    return backend


def _machine(server_args: ServerArgs) -> str:
    device = device_type(server_args)
    return f"this GPU (sm_{get_platform().device_sm})" if device == "cuda" else device
