"""DFLASH's command line: what is refused, what is defaulted, and what SGLang's other parts are told.

`ServerArgs` keeps what the user said. What becomes of it is declared beside it while SGLang resolves its arguments
(`declare_resolution`), and read through a view (`resolving_view`). Takes the place of SGLang's
`speculative_hook._handle_dflash`, which runs in that resolution.
"""

from __future__ import annotations

import json
import logging
import os

import msgspec
from huggingface_hub.errors import StrictDataclassError
from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig, ModelImpl
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length
from transformers import PretrainedConfig

from sglang_dflash import hooks
from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import (
    DEFAULT_CANDIDATES,
    MAX_CANDIDATES,
    MAX_NODES,
    MIN_NODES,
    ConfigError,
    DFlashConfig,
    TargetFacts,
    check_checkpoint_path,
    resolve_block_size,
    resolve_tree,
)
from sglang_dflash.checkpoint.tensors import check_tensors, read_headers, safetensors_files
from sglang_dflash.recurrent.arguments import check_arguments as check_recurrent_arguments

logger = logging.getLogger(__name__)

# Devices on which trees are verified by default, because their extra tokens cost nothing there.
TREE_DEVICES = ("cuda",)

DRAFT_BACKENDS = {"cuda": ("fa3", "flashinfer", "triton"), "cpu": ("torch_native", "triton")}

KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# Server features that DFLASH does not support: `ServerArgs` fields that must keep their defaults, whether the user sets
# them or SGLang does for the model. SGLang derives the flag from the field, with dashes.
UNSUPPORTED = (
    # How the work is spread: DFLASH knows tensor parallelism and independent replicas.
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
    # KV that moves between servers or tiers, or is laid out differently: the drafter's context would not follow.
    "disaggregation_mode",
    "enable_pd_role_switch",
    "enable_hierarchical_cache",
    "enable_unified_cache_external_linker",
    "enable_lmcache",
    "enable_flexkv",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    # Weights that arrive when graphs have been captured, or on demand, and forwards that leave out what the cycle hooks
    # into.
    "startup_weight_load_mode",
    "weight_cache_mode",
    "enable_paged_experts",
    "enable_amd_monokernel",
    "enable_nvidia_megakernel",
    # Kernels are launched, and attention is planned, in ways that it cannot trace; nor are they graphs in pieces.
    "enable_torch_compile",
    "debug_cuda_graph",
    # Front ends in processes into which SGLang loads no plugins, or beside its own: requests would not be checked.
    "tokenizer_worker_num",
    "smg_grpc_mode",
    "grpc_mode",
    # Asks for the layers of target and drafter by the name that they have in a target.
    "debug_tensor_dump_output_folder",
    # What is served, and what is returned with it.
    "is_embedding",
    "enable_mis",
    "encoder_only",
    "dllm_algorithm",
    "enable_lora",
    "lora_paths",
    "enable_strict_thinking",
    "enable_watermark",
    "enable_return_routed_experts",
    "enable_return_indexer_topk",
)
# Options of other algorithms and of other drafters, which would be ignored: fields that the user must leave alone.
IGNORED = (
    "speculative_adaptive_config",
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

_SOURCE = "sglang_dflash"


def resolve_speculative_arguments(original, server_args: ServerArgs) -> None:
    """AROUND `speculative_hook.handle_speculative_decoding`, which completes some arguments and opens the drafter."""
    if not is_dflash(server_args):
        original(server_args)
        return
    hooks.verify()
    refuse_unsupported(server_args)
    load_drafter_config(server_args)
    check_draft_window(server_args)
    check_graphs(server_args)
    check_adaptive(server_args)
    check_preferred_params(server_args)
    cfg = resolving_view(server_args)
    if cfg.speculative_use_block_verification:
        declare_resolution(server_args, _SOURCE, speculative_use_block_verification=False)
        logger.info(
            "--speculative-use-block-verification changes nothing: DFLASH's drafts are greedy, and of those a block is "
            "accepted as often token by token."
        )
    # SGLang would switch it off with a warning: its own is for EAGLE.
    is_adaptive = cfg.speculative_adaptive
    declare_resolution(server_args, _SOURCE, speculative_adaptive=False)
    original(server_args)
    declare_resolution(server_args, _SOURCE, speculative_adaptive=is_adaptive)
    check_deterministic(server_args)
    check_trees(server_args)
    # What `overrides.max_speculative_num_draft_tokens` would compute from EAGLE's steps, and keeps here.
    server_args._max_speculative_num_draft_tokens = cfg.speculative_num_draft_tokens


def is_dflash(server_args: ServerArgs) -> bool:
    # Not what the user said: beside --enable-return-aux-hidden-states SGLang speculates nothing.
    algorithm = resolving_view(server_args).speculative_algorithm
    return algorithm is not None and algorithm.upper() == "DFLASH"


def serves_dflash() -> bool:
    """Of the server that this process is a part of, once it is configured."""
    return SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm).is_dflash()


def handle_dflash(server_args: ServerArgs) -> None:
    """Check and complete the arguments of a server that was asked for DFLASH.

    Raises:
        ConfigError: naming the flag or checkpoint field, and its value.
    """
    # Also here, in case the hook around `handle_speculative_decoding` is the one that did not take.
    hooks.verify()
    cfg = resolving_view(server_args)
    hf_config = read_drafter(server_args)
    drafter = DFlashConfig.from_dict(hf_config.to_dict(), cfg.speculative_draft_model_path)
    target = target_facts(server_args)
    drafter.check_target(target)
    if target.is_recurrent:
        check_recurrent_arguments(server_args)
    drafter.check_tensor_parallel(cfg.tp_size)
    check_context_length(server_args, hf_config)
    check_dtypes(server_args)
    check_eagle_shape(server_args)
    sizes = (drafter.block_size, cfg.speculative_dflash_block_size, cfg.speculative_num_draft_tokens)
    if asks_for_trees(server_args):
        block_size, num_rows = resolve_tree(*sizes)
    else:
        block_size = num_rows = resolve_block_size(*sizes)
    if target.is_recurrent and num_rows > block_size:
        num_rows = block_size
    if asks_for_trees(server_args) and target.is_recurrent:
        logger.info(
            "--speculative-eagle-topk %s changes nothing for %s: recurrent states follow one path, so DFLASH verifies "
            "chains of %d tokens.",
            server_args.speculative_eagle_topk,
            target.architecture,
            num_rows,
        )
    if block_size < drafter.block_size:
        logger.info("DFLASH serves blocks of %d; the drafter was trained with %d.", block_size, drafter.block_size)
    choices = draft_attention_backends(server_args)
    backend = draft_attention_backend(server_args, choices)
    drafter.check_attention_backend(backend, block_size, choices)
    check_local_tensors(server_args, drafter)
    declare_resolution(
        server_args,
        _SOURCE,
        speculative_num_draft_tokens=num_rows,
        speculative_dflash_block_size=block_size,
        # EAGLE's shape; SGLang's KV accounting reads it for every algorithm. What the user asked for stays with
        # `server_args`: see `num_candidates`.
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_draft_attention_backend=backend,
        speculative_draft_model_quantization=None,
    )
    if cfg.enable_memory_saver and not (cfg.enable_weights_cpu_backup or cfg.enable_draft_weights_cpu_backup):
        declare_resolution(server_args, _SOURCE, enable_draft_weights_cpu_backup=True)
        logger.info(
            "The drafter's weights are kept in host memory while their GPU memory is released: whoever brings the "
            "target's new weights has none for the drafter."
        )
    if cfg.max_running_requests is None:
        declare_resolution(server_args, _SOURCE, max_running_requests=48)
        logger.info("DFLASH serves up to 48 requests at a time; --max-running-requests changes that.")


def refuse_unsupported(server_args: ServerArgs) -> None:
    """Raise :class:`ConfigError` for the first field that DFLASH cannot honour: of those that the user has set, or that
    SGLang has for them."""
    cfg = resolving_view(server_args)
    defaults = {field.name: field.default for field in msgspec.structs.fields(server_args)}
    refused = [name for name in defaults if name in UNSUPPORTED + IGNORED or name.startswith(IGNORED_PREFIXES)]
    values = [(name, getattr(server_args, name)) for name in refused]
    values += [(name, getattr(cfg, name)) for name in UNSUPPORTED]
    for name, value in values:
        # A switch may be None, False, "none" or an empty list where it is off; 0 is a value.
        if value == defaults[name] or value is None or value is False or value in ("none", []):
            continue
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {value} is not supported with --speculative-algorithm DFLASH.")
    if cfg.model_impl.lower() == ModelImpl.TRANSFORMERS:
        raise ConfigError(
            f"--model-impl {cfg.model_impl} is not supported with --speculative-algorithm DFLASH: hidden states are "
            "captured in SGLang's own classes, and the drafter is one."
        )
    if cfg.grammar_backend == "outlines":
        raise ConfigError(
            "--grammar-backend outlines is not supported with --speculative-algorithm DFLASH: of the tokens of a block "
            "it rules on the first alone; choose xgrammar or llguidance."
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "SGLANG_RUST_SERVER=1 is not supported with --speculative-algorithm DFLASH: requests would not be checked."
        )
    if envs.SGLANG_USE_HND_KVCACHE.get():
        raise ConfigError(
            "SGLANG_USE_HND_KVCACHE=1 is not supported with --speculative-algorithm DFLASH: the drafter's context is "
            "written token by token, with all heads of one beside each other."
        )


def check_preferred_params(server_args: ServerArgs) -> None:
    """What requests get that leave something out, behind the check of requests."""
    # Imported here: it asks this module whether DFLASH is served.
    from sglang_dflash.requests.validate import check_sampling_params

    preferred = resolving_view(server_args).preferred_sampling_params
    if not preferred:
        return
    try:
        # SGLang parses it later.
        params = json.loads(preferred) if isinstance(preferred, str) else preferred
        check_sampling_params(params, model_config_of(server_args).vocab_size)
    except ValueError as error:
        raise ConfigError(f"--preferred-sampling-params {preferred}: {error}") from error


def check_eagle_shape(server_args: ServerArgs) -> None:
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


def asks_for_trees(server_args: ServerArgs) -> bool:
    """Whether the user has asked for trees of drafts; see :func:`num_candidates` for what is served."""
    return (server_args.speculative_eagle_topk or 1) > 1


def num_candidates(server_args: ServerArgs, target: ModelConfig) -> int:
    """Of every position, that may be in a tree; 1: drafts are verified in chains.

    Without `--speculative-eagle-topk` there are trees of as many nodes as a block has tokens where they cost nothing,
    and where results need not be the same whatever else is served.
    """
    if mambaish_config(target) is not None:
        return 1
    if server_args.speculative_eagle_topk is not None:
        return server_args.speculative_eagle_topk
    cfg = resolving_view(server_args)
    is_size_of_trees = MIN_NODES <= cfg.speculative_num_draft_tokens <= MAX_NODES
    is_fixed = cfg.enable_deterministic_inference or cfg.rl_on_policy_target is not None
    has_trees = is_size_of_trees and not is_fixed and device_type(server_args) in TREE_DEVICES
    return DEFAULT_CANDIDATES if has_trees else 1


def check_draft_window(server_args: ServerArgs) -> None:
    window = server_args.speculative_draft_window_size
    if window is not None and window < 1:
        raise ConfigError(
            f"--speculative-draft-window-size must be at least 1, got {window}: the context tokens that the drafter "
            "sees; leave it out to let it see all."
        )


def check_graphs(server_args: ServerArgs) -> None:
    """A cycle is captured whole; SGLang's graphs in pieces know the outputs of one forward of the target."""
    backend = resolving_view(server_args).cuda_graph_config.decode.backend
    if backend == Backend.BREAKABLE:
        raise ConfigError(
            f"--cuda-graph-backend-decode {backend}: DFLASH captures a whole cycle in one CUDA graph; leave it out, or "
            f"choose {Backend.FULL} or {Backend.DISABLED}."
        )


def check_adaptive(server_args: ServerArgs) -> None:
    """Attention backends verify as many rows as they were built for, so each number of rows has graphs of its own."""
    cfg = resolving_view(server_args)
    has_graphs = cfg.cuda_graph_config.decode.backend != Backend.DISABLED
    if cfg.speculative_adaptive and not has_graphs and device_type(server_args) != "cpu":
        raise ConfigError(
            "--speculative-adaptive verifies in CUDA graphs, and those of decoding are disabled: leave out "
            "--disable-cuda-graph, --disable-decode-cuda-graph and --cuda-graph-backend-decode."
        )


def check_trees(server_args: ServerArgs) -> None:
    """How the sums over a tree's context round depends on the lengths of all requests of its batch."""
    if asks_for_trees(server_args) and resolving_view(server_args).enable_deterministic_inference:
        raise ConfigError(
            f"--enable-deterministic-inference with --speculative-eagle-topk {server_args.speculative_eagle_topk} is "
            "not supported: a tree's results depend on the other requests of its batch; leave one of them out."
        )


def check_deterministic(server_args: ServerArgs) -> None:
    """FlashInfer's tiles have as many keys as suits the rows of a block, and with them a row's sums round."""
    cfg = resolving_view(server_args)
    is_adaptive = cfg.enable_deterministic_inference and cfg.speculative_adaptive
    if is_adaptive and "flashinfer" in attention_backends_of(cfg):
        raise ConfigError(
            "--speculative-adaptive with --enable-deterministic-inference needs --attention-backend fa3 or triton: "
            "flashinfer's results depend on how many rows of a block are verified."
        )


def check_dtypes(server_args: ServerArgs) -> None:
    """The drafter computes in the model's dtype; the KV of target and drafter may be in fp8."""
    cfg = resolving_view(server_args)
    asked = server_args.speculative_draft_model_quantization
    if asked not in (None, "unquant"):
        raise ConfigError(
            f"--speculative-draft-model-quantization {asked}: DFLASH needs an unquantised drafter; leave it out."
        )
    if cfg.quantization is not None:
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
                f"--{name.replace('_', '-')} {dtype}: SGLang's CPU engine has fp8 KV in its intel_amx attention alone, "
                "and DFLASH drafts in another."
            )


def check_local_tensors(server_args: ServerArgs, drafter: DFlashConfig) -> None:
    """What the drafter would say of its tensors when the target has been loaded. Of files that are elsewhere, or no
    safetensors, it says it then."""
    cfg = resolving_view(server_args)
    path, load_format = cfg.speculative_draft_model_path, cfg.speculative_draft_load_format or cfg.load_format
    if load_format in ("auto", "safetensors") and os.path.isdir(path) and safetensors_files(path):
        check_tensors(drafter, read_headers(path))


def check_context_length(server_args: ServerArgs, drafter: PretrainedConfig) -> None:
    """SGLang refuses a drafter with a shorter context than the target's, without saying whose context it is."""
    served = model_config_of(server_args).context_len
    trained = get_context_length(drafter)
    if served > trained and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise ConfigError(
            f"max_position_embeddings={trained} of drafter {drafter._name_or_path} does not reach "
            f"the target's context of {served} tokens; set --context-length {trained}."
        )


def device_type(server_args: ServerArgs) -> str:
    return resolving_view(server_args).device.split(":")[0]


def draft_attention_backends(server_args: ServerArgs) -> tuple[str, ...]:
    """The attention backends that the device has for a drafter."""
    device = device_type(server_args)
    if device not in DRAFT_BACKENDS:
        raise ConfigError(f"--device {device}: DFLASH runs on {' and '.join(DRAFT_BACKENDS)}.")
    return DRAFT_BACKENDS[device]


def draft_attention_backend(server_args: ServerArgs, choices: tuple[str, ...]) -> str:
    """The drafter's attention backend: its own flag, else the target's decode backend."""
    cfg = resolving_view(server_args)
    _, target_backend = attention_backends_of(cfg)
    backend = cfg.speculative_draft_attention_backend or target_backend
    if backend not in choices:
        # In the order in which they count; without any of them, SGLang has chosen.
        flags = ("speculative_draft_attention_backend", "decode_attention_backend", "attention_backend")
        given = [f"--{name.replace('_', '-')} {backend}" for name in flags if getattr(server_args, name) == backend]
        subject = given[0] if given else f"{backend}, the target's attention backend by default"
        raise ConfigError(
            f"{subject}: DFLASH's drafter runs on {', '.join(choices)} on {device_type(server_args)}; "
            "choose one with --speculative-draft-attention-backend."
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


def read_drafter(server_args: ServerArgs) -> PretrainedConfig:
    """The drafter's `config.json`, with `--json-model-override-args` applied as SGLang does."""
    cfg = resolving_view(server_args)
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    check_checkpoint_path(path)
    try:
        overrides = json.loads(cfg.json_model_override_args)
        raw = formats.read_config(path, revision)
        formats.refuse_others(raw, path)
        config = get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=revision,
            model_override_args=overrides,
        )
    except ConfigError:
        raise
    except (OSError, ValueError, StrictDataclassError) as error:
        # transformers names neither the flag nor, for a repository, the path.
        reason = " ".join(str(error).split())
        raise ConfigError(f"--speculative-draft-model-path {path} cannot be read: {reason}") from error
    if overrides:
        try:
            formats.check_overridden(config, path)
        except ConfigError as error:
            raise ConfigError(f"--json-model-override-args is for the drafter, too. {error}") from error
    return config


def load_drafter_config(server_args: ServerArgs) -> DFlashConfig:
    path = resolving_view(server_args).speculative_draft_model_path
    return DFlashConfig.from_dict(read_drafter(server_args).to_dict(), path)


def target_facts(server_args: ServerArgs) -> TargetFacts:
    model_config = model_config_of(server_args)
    text_config = model_config.hf_text_config
    return TargetFacts(
        path=resolving_view(server_args).model_path,
        architecture=model_config.hf_config.architectures[0],
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_layers=text_config.num_hidden_layers,
        is_recurrent=mambaish_config(model_config) is not None,
    )
