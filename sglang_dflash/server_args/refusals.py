"""Flags that DFLASH refuses, each with one error that names the flag and its value."""

from __future__ import annotations

import logging

import msgspec
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, ModelImpl
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.config import MAX_CANDIDATES, DFlashConfig, TargetFacts
from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args.adaptive import lora_flag
from sglang_dflash.server_args.backends import device_type
from sglang_dflash.server_args.trees import asks_for_trees

logger = logging.getLogger(__name__)

# What SGLang makes of a drafter's 16-bit weights.
DRAFT_QUANTIZATION = "fp8"
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# `ServerArgs` fields of features that DFLASH does not support. They must keep their defaults, whether the user or
# SGLang sets them. SGLang derives the flag from the field, with dashes.
UNSUPPORTED = (
    # Parallelism other than tensor parallelism and independent replicas.
    "pp_size",
    "dcp_size",
    "attn_cp_size",
    "enable_prefill_cp",
    "enable_cp_tp_group_sharing",
    "enable_dp_attention",
    "attn_dp_size",
    "enable_attn_tp_input_scattered",
    "enable_layernorm_sp",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "elastic_ep_backend",
    # KV that moves between servers, or has another layout: the drafter's KV does not follow it.
    "enable_pd_role_switch",
    "disaggregation_decode_enable_offload_kvcache",
    "hicache_host_memory_mode",
    "enable_unified_cache_external_linker",
    "enable_lmcache",
    "enable_flexkv",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    # Weights that are loaded after graphs are captured, or on demand, and forwards without the layers that the cycle
    # hooks into.
    "startup_weight_load_mode",
    "weight_cache_mode",
    "enable_paged_experts",
    "enable_amd_monokernel",
    "enable_nvidia_megakernel",
    # torch.compile cannot trace how kernels are launched and attention is planned. A cycle is one graph, not pieces.
    "enable_torch_compile",
    "debug_cuda_graph",
    # Looks for the drafter's layers by the names that they have in a target.
    "debug_tensor_dump_output_folder",
    # Takes KV that a kernel of this package moves for KV that was overwritten.
    "kv_canary",
    # Other tasks, and outputs that the cycle does not collect.
    "is_embedding",
    "enable_mis",
    "encoder_only",
    "dllm_algorithm",
    "enable_strict_thinking",
    "enable_watermark",
    "enable_return_routed_experts",
    "enable_return_indexer_topk",
)
# Fields that only other algorithms and other drafters read. The user must not set them.
IGNORED = (
    "speculative_token_map",
    "speculative_use_rejection_sampling",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_draft_sink_size",
    "speculative_domino_candidate_pool_size",
    "speculative_dsa_topk_backend",
    "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "enable_multi_layer_eagle",
    "decrypted_draft_config_file",
    "spec_trace_dir",
    "uno_lora_path",
)
IGNORED_PREFIXES = ("speculative_ngram_", "speculative_dspark_", "decoupled_spec_")


def refuse_unsupported(server_args: ServerArgs) -> None:
    """Raise :class:`ConfigError` for the first unsupported field that the user has set, or SGLang for the model."""
    cfg = resolving_view(server_args)
    defaults = {field.name: field.default for field in msgspec.structs.fields(server_args)}
    refused = [name for name in defaults if name in UNSUPPORTED + IGNORED or name.startswith(IGNORED_PREFIXES)]
    values = [(name, getattr(server_args, name)) for name in refused]
    values += [(name, getattr(cfg, name)) for name in UNSUPPORTED]
    for name, value in values:
        # A feature that is off may be None, False, "none" or an empty list. 0 is a value.
        if value == defaults[name] or value is None or value is False or value in ("none", []):
            continue
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {value} is not supported with --speculative-algorithm DFLASH.")
    if cfg.model_impl.lower() == ModelImpl.TRANSFORMERS:
        raise ConfigError(
            f"--model-impl {cfg.model_impl} is not supported with --speculative-algorithm DFLASH: it captures hidden "
            "states in SGLang's own classes; leave the flag out."
        )
    if cfg.grammar_backend == "outlines":
        raise ConfigError(
            "--grammar-backend outlines is not supported with --speculative-algorithm DFLASH: it masks only the first "
            "token of a block; choose xgrammar or llguidance."
        )
    if envs.SGLANG_USE_HND_KVCACHE.get():
        raise ConfigError(
            "SGLANG_USE_HND_KVCACHE=1 is not supported with --speculative-algorithm DFLASH: it writes the KV of one "
            "token contiguously, heads included."
        )


def check_eagle_shape(server_args: ServerArgs) -> None:
    """Check the flags of EAGLE that DFLASH gives a meaning of its own."""
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    if steps not in (None, 1):
        raise ConfigError(
            f"--speculative-num-steps {steps}: DFLASH drafts one block in one step; leave it out, and set "
            "--speculative-dflash-block-size instead."
        )
    if topk is not None and not 1 <= topk <= MAX_CANDIDATES:
        raise ConfigError(
            f"--speculative-eagle-topk {topk}: the candidates for every position of a tree of drafts, at least 1 (a "
            f"chain) and at most {MAX_CANDIDATES}."
        )


def check_draft_window(server_args: ServerArgs) -> None:
    """Check `--speculative-draft-window-size`."""
    window = server_args.speculative_draft_window_size
    if window is not None and window < 1:
        raise ConfigError(
            f"--speculative-draft-window-size must be at least 1, got {window}: the context tokens that the drafter "
            "sees; leave it out to let it see all."
        )


def check_graphs(server_args: ServerArgs) -> None:
    """Refuse SGLang's graphs in pieces: DFLASH captures one graph for a whole cycle."""
    backend = resolving_view(server_args).cuda_graph_config.decode.backend
    if backend == Backend.BREAKABLE:
        raise ConfigError(
            f"--cuda-graph-backend-decode {backend}: DFLASH captures a whole cycle in one CUDA graph; leave it out, or "
            f"choose {Backend.FULL} or {Backend.DISABLED}."
        )


def check_lora(server_args: ServerArgs) -> None:
    """Refuse a LoRA backend whose graphs are not those of a cycle."""
    flag = lora_flag(server_args)
    if flag is not None and resolving_view(server_args).lora_backend == "triton_v2":
        raise ConfigError(
            f"{flag} with --lora-backend triton_v2 is not supported: it captures every CUDA graph twice, with adapters "
            "and without; choose csgmv or triton."
        )


def check_host_cache(server_args: ServerArgs, drafter: DFlashConfig, target: TargetFacts) -> None:
    """Refuse KV in host memory for pairs whose KV SGLang cannot move together."""
    if not resolving_view(server_args).enable_hierarchical_cache:
        return
    flag = "--enable-hierarchical-cache"
    if target.is_recurrent:
        raise ConfigError(f"{flag} is not supported with DFLASH for a target with recurrent layers; leave it out.")
    if model_config_of(server_args).is_hybrid_swa:
        raise ConfigError(f"{flag} is not supported with DFLASH for a target with sliding windows; leave it out.")
    if len(drafter.layers) > target.num_layers:
        raise ConfigError(
            f"{flag}: drafter {drafter.path} has num_hidden_layers={len(drafter.layers)}, and the target only "
            f"{target.num_layers}: SGLang loads a layer of the drafter with each layer of the target; leave it out."
        )
    cfg = resolving_view(server_args)
    check_storage(cfg.hicache_storage_backend, model_config_of(server_args), cfg.tp_size)


def check_storage(backend: str | None, model_config: ModelConfig, tp_size: int) -> None:
    """Refuse stores of KV that would give every tensor-parallel rank the drafter's KV of the first one.

    All ranks have the same KV of a target with latent attention, and SGLang stores it once. The drafter's KV differs.
    SGLang knows that in the keys of Mooncake only (`HybridCacheController.should_backup`).

    Args:
        backend: `--hicache-storage-backend`.
        model_config: of the target.
        tp_size: number of ranks.
    """
    if backend in (None, "mooncake") or tp_size == 1 or model_config.attention_arch != AttentionArch.MLA:
        return
    raise ConfigError(
        f"--hicache-storage-backend {backend} with --tp-size {tp_size} is not supported with DFLASH for a target with "
        "latent attention: it stores the drafter's KV of one rank only; choose mooncake, or leave it out."
    )


def check_disaggregation(server_args: ServerArgs, target: TargetFacts) -> None:
    """Refuse what prefill and decode on different servers do not go with."""
    cfg = resolving_view(server_args)
    flag = f"--disaggregation-mode {cfg.disaggregation_mode}"
    if cfg.disaggregation_mode == "null":
        return
    if target.is_recurrent:
        raise ConfigError(f"{flag} is not supported with DFLASH for a target with recurrent layers; leave it out.")
    if model_config_of(server_args).is_hybrid_swa:
        raise ConfigError(f"{flag} is not supported with DFLASH for a target with sliding windows; leave it out.")
    if cfg.disaggregation_decode_retraction_backup == "cpu_tensor":
        raise ConfigError(
            f"--disaggregation-decode-retraction-backup cpu_tensor with {flag} is not supported with DFLASH: it keeps "
            "the target's KV of retracted requests, and not the drafter's; leave it out."
        )


def check_deterministic(server_args: ServerArgs) -> None:
    """Refuse trees under `--enable-deterministic-inference`: a request's results would depend on other requests.

    In a tree, the order of a sum over the context depends on the lengths of all requests of the batch.
    """
    if asks_for_trees(server_args) and resolving_view(server_args).enable_deterministic_inference:
        raise ConfigError(
            f"--enable-deterministic-inference with --speculative-eagle-topk {server_args.speculative_eagle_topk} is "
            "not supported: a tree's results depend on the other requests of its batch; leave one of them out."
        )


def draft_quantization(server_args: ServerArgs) -> str | None:
    """Return the format that the user asked for the drafter's weights; None: that of the checkpoint."""
    asked = server_args.speculative_draft_model_quantization
    return asked if asked == DRAFT_QUANTIZATION else None


def check_dtypes(server_args: ServerArgs, drafter: DFlashConfig) -> None:
    """Check the formats of the drafter's weights, and of the KV of target and drafter."""
    cfg = resolving_view(server_args)
    asked = server_args.speculative_draft_model_quantization
    if asked not in (None, "unquant", DRAFT_QUANTIZATION):
        raise ConfigError(
            f"--speculative-draft-model-quantization {asked}: DFLASH quantises a drafter's weights to "
            f"{DRAFT_QUANTIZATION}; give that, or leave the flag out."
        )
    if drafter.quantization is not None and asked is not None:
        raise ConfigError(
            f"--speculative-draft-model-quantization {asked}: the weights of drafter {drafter.path} are float8 "
            "already; leave the flag out."
        )
    if cfg.dtype == "float32" and device_type(server_args) != "cpu":
        if asked == DRAFT_QUANTIZATION:
            raise ConfigError(
                f"--speculative-draft-model-quantization {asked} with --dtype float32: SGLang has products of float8 "
                "weights in bfloat16 and float16; leave one of them out."
            )
        if drafter.quantization is not None:
            raise ConfigError(
                f"--dtype float32 with the float8 weights of drafter {drafter.path}: SGLang has products of these in "
                "bfloat16 and float16; leave the flag out."
            )
    if cfg.quantization is not None and asked != DRAFT_QUANTIZATION and drafter.quantization is None:
        logger.info("--quantization %s is the target's; DFLASH's drafter stays unquantised.", cfg.quantization)
    for name in ("kv_cache_dtype", "speculative_draft_kv_cache_dtype"):
        dtype = getattr(cfg, name)
        if dtype is not None and dtype not in KV_DTYPES:
            raise ConfigError(
                f"--{name.replace('_', '-')} {dtype}: DFLASH keeps the KV of target and drafter in one of "
                f"{', '.join(KV_DTYPES)}."
            )
        if dtype in ("fp8_e4m3", "fp8_e5m2") and device_type(server_args) == "cpu":
            raise ConfigError(
                f"--{name.replace('_', '-')} {dtype}: on a CPU only SGLang's intel_amx attention has fp8 KV, and "
                "DFLASH does not draft with it; leave it out."
            )
