"""DFLASH's command line: what is refused, what is defaulted, and what SGLang's other parts are told.

Takes the place of SGLang's `speculative_hook._handle_dflash`, which runs while `ServerArgs` are being resolved.
"""

from __future__ import annotations

import json
import logging

from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dflash import hooks
from sglang_dflash.config import (
    ConfigError,
    DFlashConfig,
    TargetFacts,
    check_checkpoint_path,
    resolve_block_size,
)

logger = logging.getLogger(__name__)

DRAFT_BACKENDS = {"cuda": ("fa3", "flashinfer", "triton"), "cpu": ("torch_native", "triton")}

# Server features that DFLASH does not support, as (flag, ServerArgs field, the value that leaves it off).
UNSUPPORTED = (
    ("--pipeline-parallel-size", "pp_size", 1),
    ("--enable-dp-attention", "enable_dp_attention", False),
    ("--enable-lora", "enable_lora", None),
    ("--lora-paths", "lora_paths", None),
    ("--enable-two-batch-overlap", "enable_two_batch_overlap", False),
    ("--enable-pdmux", "enable_pdmux", False),
    ("--disaggregation-mode", "disaggregation_mode", "null"),
    ("--enable-hierarchical-cache", "enable_hierarchical_cache", False),
    ("--enable-unified-memory", "enable_unified_memory", False),
    ("--dcp-size", "dcp_size", 1),
    ("--speculative-adaptive", "speculative_adaptive", False),
    ("--speculative-token-map", "speculative_token_map", None),
    ("--speculative-use-rejection-sampling", "speculative_use_rejection_sampling", False),
    ("--speculative-draft-window-size", "speculative_draft_window_size", None),
    ("--speculative-accept-threshold-single", "speculative_accept_threshold_single", 1.0),
    ("--speculative-accept-threshold-acc", "speculative_accept_threshold_acc", 1.0),
)


def resolve_speculative_arguments(original, server_args: ServerArgs) -> None:
    """AROUND `speculative_hook.handle_speculative_decoding`: look at the drafter's path before SGLang opens it."""
    if is_dflash(server_args):
        hooks.verify()
        check_checkpoint_path(server_args.speculative_draft_model_path)
    original(server_args)


def is_dflash(server_args: ServerArgs) -> bool:
    algorithm = server_args.speculative_algorithm
    return algorithm is not None and algorithm.upper() == "DFLASH"


def handle_dflash(server_args: ServerArgs) -> None:
    """Check and complete the arguments of a server that was asked for DFLASH.

    Raises:
        ConfigError: naming the flag or checkpoint field, and its value.
    """
    refuse_unsupported(server_args)
    drafter = load_drafter_config(server_args)
    drafter.check_target(target_facts(server_args))
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
    server_args.speculative_draft_attention_backend = draft_attention_backend(server_args)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
        logger.info("DFLASH serves up to 48 requests at a time; --max-running-requests changes that.")
    if server_args.enable_mixed_chunk:
        server_args.enable_mixed_chunk = False
        logger.warning("--enable-mixed-chunk is off: DFLASH does not mix prefill and decode in one batch.")


def refuse_unsupported(server_args: ServerArgs) -> None:
    view = resolved_view(server_args)
    for flag, field, off in UNSUPPORTED:
        value = getattr(view, field)
        if value != off and value:
            raise ConfigError(f"{flag} {value} is not supported with --speculative-algorithm DFLASH.")


def draft_attention_backend(server_args: ServerArgs) -> str:
    """The drafter's attention backend: its own flag, else the target's decode backend."""
    device = server_args.device.split(":")[0]
    if device not in DRAFT_BACKENDS:
        raise ConfigError(f"--device {server_args.device}: DFLASH runs on {' and '.join(DRAFT_BACKENDS)}.")
    asked = server_args.speculative_draft_attention_backend
    _, target_backend = attention_backends_of(resolved_view(server_args))
    backend = asked or target_backend
    if backend not in DRAFT_BACKENDS[device]:
        flag = "--speculative-draft-attention-backend" if asked else "--attention-backend"
        raise ConfigError(
            f"{flag} {backend}: DFLASH's drafter runs on {', '.join(DRAFT_BACKENDS[device])} on {device}; "
            "choose one with --speculative-draft-attention-backend."
        )
    return backend


def load_drafter_config(server_args: ServerArgs) -> DFlashConfig:
    """The drafter's checkpoint config, with `--json-model-override-args` applied as SGLang does."""
    path = server_args.speculative_draft_model_path
    check_checkpoint_path(path)
    hf_config = get_config(
        path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    return DFlashConfig.from_dict(hf_config.to_dict(), path)


def target_facts(server_args: ServerArgs) -> TargetFacts:
    text_config = server_args.get_model_config().hf_text_config
    return TargetFacts(
        path=server_args.model_path,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        num_layers=text_config.num_hidden_layers,
    )
