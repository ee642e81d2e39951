"""Hooks into the functions of SGLang that need a GPU.

Each does on CPU tensors what SGLang does on a GPU, so that speculative decoding, grammars and paged KV run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xgrammar
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor
from torch.nn.functional import silu

from sglang_dflash.hooks import Hook
from sglang_dflash_cpu import fp8_linear, host_pool
from sglang_dflash_cpu.pinned_memory import without_pinning

_COMPRESSED_TENSORS = "compressed_tensors.compressed_tensors.CompressedTensorsConfig"


def _extend_forward_kwargs(
    original: Callable,
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    pp_proxy_tensors: PPProxyTensors | None,
) -> dict[str, Any]:
    kwargs = original(runner, forward_batch, pp_proxy_tensors)
    if forward_batch.input_embeds is not None:
        embeds = forward_batch.input_embeds.to(runner.dtype)
        if forward_batch.replace_embeds is not None and forward_batch.replace_positions is not None:
            embeds = embeds.clone()
            embeds[forward_batch.replace_positions] = forward_batch.replace_embeds.to(runner.dtype)
        kwargs["input_embeds"] = embeds
    return kwargs


def _apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return MurmurHash3 of (seed, position, column), as the Triton kernel of the same name does.

    Args:
        seed: [n] uint64.
        positions: [n] integer below 2**32.
        col_indices: [m] integer below 2**32.

    Returns:
        [n, m] int64 hashes below 2**32.
    """
    low32 = 0xFFFFFFFF

    def mix(hashed: Tensor | int, key: Tensor) -> Tensor:
        # int64 products wrap around, which does not change their low 32 bits.
        key = key * 0xCC9E2D51 & low32
        key = (key << 15 | key >> 17) & low32
        hashed = hashed ^ (key * 0x1B873593 & low32)
        hashed = (hashed << 13 | hashed >> 19) & low32
        return hashed * 5 + 0xE6546B64 & low32

    seed = seed.view(torch.int64)[:, None]
    hashed = mix(0, seed & low32)
    for key in (seed >> 32 & low32, positions[:, None].to(torch.int64), col_indices[None].to(torch.int64)):
        hashed = mix(hashed, key)
    # 16 bytes are hashed.
    hashed = hashed ^ 16
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & low32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & low32
    return hashed ^ hashed >> 16


def _skip_batch_invariant_mode(original: Callable, runner: ModelRunner) -> None:
    if runner.device != "cpu":
        original(runner)


def _gated_rmsnorm(norm: RMSNorm, x: Tensor, z: Tensor) -> Tensor:
    """Return the RMS norm of x, [T, N], times the activation of z, [T, N]."""
    assert norm.norm_before_gate and norm.group_size is None
    return _gated(x, norm.weight, norm.eps, z, norm.activation)


def _fused_gated_rmsnorm(norm: FusedRMSNormGated, x: Tensor, g: Tensor) -> Tensor:
    """Return the RMS norm of x, [T, N], times the activation of g, [T, N]."""
    return _gated(x, norm.weight, norm.eps, g, norm.activation)


def _gated(x: Tensor, weight: Tensor, eps: float, gate: Tensor, activation: str) -> Tensor:
    widened, gate = x.float(), gate.float()
    normed = widened * torch.rsqrt(widened.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * (gate.sigmoid() if activation == "sigmoid" else silu(gate))).to(x.dtype)


def _add_gated_shared_expert(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add the gated output of the shared expert to that of the routed experts, in place.

    Args:
        hidden_states: [T, H], the input of the gate.
        gate_weight: [H], the weights of the gate.
        shared_output: [T, H], the output of the shared expert.
        final_hidden_states: [T, H], the output of the routed experts, written.
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states += (gate[:, None] * shared_output.float()).to(final_hidden_states.dtype)


def _supports_extra_buffer(original: Callable, view: Any, hf_config: Any) -> bool:
    algorithm = view.speculative_algorithm
    return algorithm is not None and algorithm.upper() == "DFLASH" and original(view, hf_config)


def _platform_supports_extra_buffer() -> bool:
    return True


CPU_HOOKS: list[Hook] = [
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind=HookType.AROUND,
        function=_extend_forward_kwargs,
        why="it rounds `input_embeds` to bfloat16, also if the model has another dtype",
        until="SGLang casts them to the model's dtype",
    ),
    Hook(
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        kind=HookType.REPLACE,
        function=_apply_vocab_mask,
        why="it refuses logits on the CPU",
        until="SGLang calls xgrammar's CPU operator for them",
    ),
    Hook(
        target="sglang.srt.layers.sampler.murmur_hash32",
        kind=HookType.REPLACE,
        function=_murmur_hash32,
        why="sampling with a seed launches a Triton kernel",
        until="SGLang has a torch version for CPUs",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        kind=HookType.AROUND,
        function=_skip_batch_invariant_mode,
        why="--enable-deterministic-inference replaces matrix products by Triton kernels",
        until="SGLang has batch-invariant operators for CPUs, or keeps PyTorch's there",
    ),
    Hook(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        kind=HookType.REPLACE,
        function=_gated_rmsnorm,
        why="the norm of Qwen3.5's Gated DeltaNet layers launches a Triton kernel on a CPU without AMX",
        until="SGLang has a torch version for CPUs",
    ),
    Hook(
        target="sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
        kind=HookType.REPLACE,
        function=_fused_gated_rmsnorm,
        why="the norm of Qwen3-Next's Gated DeltaNet layers launches a Triton kernel on a CPU without AMX",
        until="SGLang has a torch version for CPUs",
    ),
    Hook(
        target="sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        kind=HookType.REPLACE,
        function=_add_gated_shared_expert,
        why="the gate of a shared expert launches a Triton kernel",
        until="SGLang has a torch version for CPUs",
    ),
    Hook(
        target="sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer",
        kind=HookType.AROUND,
        function=_supports_extra_buffer,
        why="without speculation, --mamba-radix-cache-strategy auto would choose extra_buffer, which needs pinned "
        "memory and a Triton kernel in decoding",
        until="SGLang keeps the states of decoding requests on a CPU",
    ),
    Hook(
        target="sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        kind=HookType.REPLACE,
        function=_platform_supports_extra_buffer,
        why="it refuses the CPU, though DFLASH keeps the states of decoding requests itself",
        until="SGLang keeps the states of decoding requests on a CPU",
    ),
    *(
        Hook(
            target=target,
            kind=HookType.AROUND,
            function=without_pinning,
            why=f"{what} are in pinned memory",
            until="SGLang pins memory only where there is a GPU",
        )
        for target, what in (
            ("sglang.srt.lora.lora_manager.LoRAManager.__init__", "LoRA's tables on the host"),
            (
                "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
                "LoRA's tables on the host",
            ),
            (
                "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_dummy_flat_data_page",
                "pages that a storage backend fills",
            ),
        )
    ),
    *(
        Hook(
            target=f"sglang.srt.mem_cache.pool_host.{target}",
            kind=HookType.REPLACE,
            function=function,
            why=why,
            until="SGLang keeps KV in host memory on a CPU",
        )
        for target, function, why in (
            ("common._cuda_host_register", host_pool.register_nothing, "it locks pages of host memory for CUDA"),
            ("mha.MHATokenToKVPoolHost.load_to_device_per_layer", host_pool.load_layer, "it calls CUDA kernels"),
            ("mha.MHATokenToKVPoolHost.backup_from_device_all_layer", host_pool.save_layers, "it calls CUDA kernels"),
        )
    ),
    *(
        Hook(
            target=f"sglang.srt.layers.quantization.{target}",
            kind=kind,
            function=function,
            why=why,
            until="SGLang has float8 weights on a CPU without AMX",
        )
        for target, kind, function, why in (
            (
                "fp8.Fp8LinearMethod.process_weights_after_loading",
                HookType.REPLACE,
                fp8_linear.load,
                "its layout is that of AMX",
            ),
            ("fp8.Fp8LinearMethod.apply", HookType.REPLACE, fp8_linear.apply, "its products need AMX"),
            *(
                (
                    f"{config}.get_supported_act_dtypes",
                    HookType.AROUND,
                    fp8_linear.supported_dtypes,
                    "it refuses float32, the dtype of tests",
                )
                for config in ("fp8.Fp8Config", _COMPRESSED_TENSORS)
            ),
            (
                f"{_COMPRESSED_TENSORS}._check_scheme_supported",
                HookType.REPLACE,
                fp8_linear.is_supported,
                "it asks CUDA",
            ),
            *(
                (f"compressed_tensors.schemes.{scheme}.{method}", HookType.REPLACE, function, "its kernels need a GPU")
                for scheme in (
                    "compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8",
                    "compressed_tensors_w8a16_fp8.CompressedTensorsW8A16Fp8",
                )
                for method, function in (
                    ("process_weights_after_loading", fp8_linear.load_compressed),
                    ("apply_weights", fp8_linear.apply_compressed),
                )
            ),
        )
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._send_kv_chunk",
        kind=HookType.AROUND,
        function=host_pool.send_kv_chunk,
        why="page numbers of KV that travels are read with a CUDA event",
        until="SGLang waits for them where there is no CUDA",
    ),
]
