"""DFLASH's command line: what is refused, what is defaulted, and what SGLang's other parts are told.

Takes the place of SGLang's `speculative_hook._handle_dflash`, which runs while `ServerArgs` are being resolved.
"""

from __future__ import annotations

import dataclasses
import json
import logging

from huggingface_hub.errors import StrictDataclassError
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length
from transformers import PretrainedConfig

from sglang_dflash import formats, hooks
from sglang_dflash.config import (
    ConfigError,
    DFlashConfig,
    TargetFacts,
    check_checkpoint_path,
    resolve_block_size,
)

logger = logging.getLogger(__name__)

DRAFT_BACKENDS = {"cuda": ("fa3", "flashinfer", "triton"), "cpu": ("torch_native", "triton")}

KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# Server features that DFLASH does not support: `ServerArgs` fields that must keep their defaults. SGLang derives the
# flag from the field, with dashes.
UNSUPPORTED = (
    # How the work is spread: DFLASH knows tensor parallelism and independent replicas.
    "pp_size",
    "dcp_size",
    "attn_cp_size",
    "enable_prefill_cp",
    "enable_dp_attention",
    "enable_attn_tp_input_scattered",
    "enable_two_batch_overlap",
    "enable_pdmux",
    # KV that moves between servers or tiers, or is laid out differently: the drafter's context would not follow.
    "disaggregation_mode",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    # What is served, and what is returned with it.
    "is_embedding",
    "encoder_only",
    "dllm_algorithm",
    "enable_lora",
    "lora_paths",
    "torchao_config",
    "enable_strict_thinking",
    "enable_return_routed_experts",
    "enable_return_indexer_topk",
    # Speculation: options of other algorithms, which would be ignored.
    "speculative_adaptive_config",
    "speculative_token_map",
    "speculative_use_rejection_sampling",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend",
    "speculative_skip_dp_mlp_sync",
    "enable_multi_layer_eagle",
    "decrypted_draft_config_file",
    "spec_trace_dir",
)
UNSUPPORTED_PREFIXES = ("speculative_ngram_", "speculative_dspark_", "decoupled_spec_")


def resolve_speculative_arguments(original, server_args: ServerArgs) -> None:
    """AROUND `speculative_hook.handle_speculative_decoding`, which completes some arguments and opens the drafter."""
    if not is_dflash(server_args):
        original(server_args)
        return
    hooks.verify()
    refuse_unsupported(server_args)
    load_drafter_config(server_args)
    check_draft_window(server_args)
    check_adaptive(server_args)
    # SGLang would switch it off with a warning: its own is for EAGLE.
    is_adaptive, server_args.speculative_adaptive = server_args.speculative_adaptive, False
    original(server_args)
    server_args.speculative_adaptive = is_adaptive
    # What this property would compute from EAGLE's steps, and caches here.
    vars(server_args)["max_speculative_num_draft_tokens"] = server_args.speculative_num_draft_tokens


def is_dflash(server_args: ServerArgs) -> bool:
    algorithm = server_args.speculative_algorithm
    return algorithm is not None and algorithm.upper() == "DFLASH"


def handle_dflash(server_args: ServerArgs) -> None:
    """Check and complete the arguments of a server that was asked for DFLASH.

    Raises:
        ConfigError: naming the flag or checkpoint field, and its value.
    """
    # Also here, in case the hook around `handle_speculative_decoding` is the one that did not take.
    hooks.verify()
    hf_config = read_drafter(server_args)
    drafter = DFlashConfig.from_dict(hf_config.to_dict(), server_args.speculative_draft_model_path)
    drafter.check_target(target_facts(server_args))
    drafter.check_tensor_parallel(server_args.tp_size)
    check_context_length(server_args, hf_config)
    check_dtypes(server_args)
    block_size = resolve_block_size(
        drafter.block_size, server_args.speculative_dflash_block_size, server_args.speculative_num_draft_tokens
    )
    if block_size < drafter.block_size:
        logger.info("DFLASH serves blocks of %d; the drafter was trained with %d.", block_size, drafter.block_size)

    server_args.speculative_num_draft_tokens = block_size
    # EAGLE's shape parameters; SGLang's KV accounting reads them for every algorithm.
    for flag in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(server_args, flag) not in (None, 1):
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(server_args, flag)}: DFLASH drafts one block in one step; leave "
                "it out, and set --speculative-dflash-block-size instead."
            )
        setattr(server_args, flag, 1)
    choices = draft_attention_backends(server_args)
    backend = draft_attention_backend(server_args, choices)
    drafter.check_attention_backend(backend, block_size, choices)
    server_args.speculative_draft_attention_backend = backend
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
        logger.info("DFLASH serves up to 48 requests at a time; --max-running-requests changes that.")
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("--enable-mixed-chunk is off: DFLASH does not mix prefill and decode in one batch.")


def refuse_unsupported(server_args: ServerArgs) -> None:
    view = resolved_view(server_args)
    for field in dataclasses.fields(ServerArgs):
        if field.name not in UNSUPPORTED and not field.name.startswith(UNSUPPORTED_PREFIXES):
            continue
        value = getattr(view, field.name)
        # A switch may be None, False or an empty list where it is off; 0 is a value.
        if value == field.default or value is None or value is False or value == []:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        raise ConfigError(f"{flag} {value} is not supported with --speculative-algorithm DFLASH.")


def check_draft_window(server_args: ServerArgs) -> None:
    window = server_args.speculative_draft_window_size
    if window is not None and window < 1:
        raise ConfigError(
            f"--speculative-draft-window-size must be at least 1, got {window}: the context tokens that the drafter "
            "sees; leave it out to let it see all."
        )


def check_adaptive(server_args: ServerArgs) -> None:
    """Attention backends verify as many rows as they were built for, so each number of rows has graphs of its own."""
    has_graphs = server_args.cuda_graph_config.decode.backend != Backend.DISABLED
    if server_args.speculative_adaptive and not has_graphs and device_type(server_args) != "cpu":
        raise ConfigError(
            "--speculative-adaptive verifies in CUDA graphs, and those of decoding are disabled: leave out "
            "--disable-cuda-graph, --disable-decode-cuda-graph and --cuda-graph-backend-decode."
        )


def check_dtypes(server_args: ServerArgs) -> None:
    """The drafter computes in the model's dtype; the KV of target and drafter may be in fp8."""
    quantization = server_args.speculative_draft_model_quantization
    if quantization is not None and quantization == server_args.quantization:
        # Where the drafter's flag is left out, SGLang has put the target's in its place.
        server_args.speculative_draft_model_quantization = None
        logger.info("--quantization %s is the target's; DFLASH's drafter stays unquantised.", quantization)
    elif quantization is not None:
        raise ConfigError(
            f"--speculative-draft-model-quantization {quantization}: DFLASH needs an unquantised drafter; leave it out."
        )
    kv_cache_dtype = resolved_view(server_args).kv_cache_dtype
    if kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype}: DFLASH keeps the KV of target and drafter in one of "
            f"{', '.join(KV_DTYPES)}."
        )


def check_context_length(server_args: ServerArgs, drafter: PretrainedConfig) -> None:
    """SGLang refuses a drafter with a shorter context than the target's, without saying whose context it is."""
    served = server_args.get_model_config().context_len
    trained = get_context_length(drafter)
    if served > trained and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise ConfigError(
            f"max_position_embeddings={trained} of drafter {server_args.speculative_draft_model_path} does not reach "
            f"the target's context of {served} tokens; set --context-length {trained}."
        )


def device_type(server_args: ServerArgs) -> str:
    return server_args.device.split(":")[0]


def draft_attention_backends(server_args: ServerArgs) -> tuple[str, ...]:
    """The attention backends that the device has for a drafter."""
    device = device_type(server_args)
    if device not in DRAFT_BACKENDS:
        raise ConfigError(f"--device {server_args.device}: DFLASH runs on {' and '.join(DRAFT_BACKENDS)}.")
    return DRAFT_BACKENDS[device]


def draft_attention_backend(server_args: ServerArgs, choices: tuple[str, ...]) -> str:
    """The drafter's attention backend: its own flag, else the target's decode backend."""
    asked = server_args.speculative_draft_attention_backend
    _, target_backend = attention_backends_of(resolved_view(server_args))
    backend = asked or target_backend
    if backend not in choices:
        flag = "--speculative-draft-attention-backend" if asked else "--attention-backend"
        raise ConfigError(
            f"{flag} {backend}: DFLASH's drafter runs on {', '.join(choices)} on {device_type(server_args)}; "
            "choose one with --speculative-draft-attention-backend."
        )
    if backend == "fa3" and resolved_view(server_args).kv_cache_dtype == "fp8_e5m2":
        # SGLang moves a target to another backend, and leaves the drafter's where the flag puts it.
        able = " or ".join(choice for choice in choices if choice != "fa3")
        raise ConfigError(
            "--kv-cache-dtype fp8_e5m2: FA3 reads no fp8 KV but fp8_e4m3, and the drafter's has the same dtype; set "
            f"--speculative-draft-attention-backend {able}."
        )
    return backend


def read_drafter(server_args: ServerArgs) -> PretrainedConfig:
    """The drafter's `config.json`, with `--json-model-override-args` applied as SGLang does."""
    path = server_args.speculative_draft_model_path
    check_checkpoint_path(path)
    try:
        raw, _ = PretrainedConfig.get_config_dict(path, revision=server_args.speculative_draft_model_revision)
        formats.refuse_others(raw, path)
        return get_config(
            path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.speculative_draft_model_revision,
            model_override_args=json.loads(server_args.json_model_override_args),
        )
    except ConfigError:
        raise
    except (OSError, ValueError, StrictDataclassError) as error:
        # transformers names neither the flag nor, for a repository, the path.
        reason = " ".join(str(error).split())
        raise ConfigError(f"--speculative-draft-model-path {path} cannot be read: {reason}") from error


def load_drafter_config(server_args: ServerArgs) -> DFlashConfig:
    return DFlashConfig.from_dict(read_drafter(server_args).to_dict(), server_args.speculative_draft_model_path)


def target_facts(server_args: ServerArgs) -> TargetFacts:
    model_config = server_args.get_model_config()
    text_config = model_config.hf_text_config
    return TargetFacts(
        path=server_args.model_path,
        architecture=model_config.hf_config.architectures[0],
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_layers=text_config.num_hidden_layers,
        is_recurrent=mambaish_config(model_config) is not None,
    )
