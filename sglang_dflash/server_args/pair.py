"""Target and drafter: what the flags say where they are, and whether they fit each other."""

from __future__ import annotations

import json
import logging
import os

from huggingface_hub.errors import StrictDataclassError
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length
from sglang.srt.utils.runai_utils import is_runai_obj_uri
from transformers import PretrainedConfig

from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import DFlashConfig, TargetFacts, check_checkpoint_path
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.checkpoint.tensors import check_tensors, read_headers, safetensors_files
from sglang_dflash.errors import ConfigError

logger = logging.getLogger(__name__)


def read_drafter(server_args: ServerArgs) -> PretrainedConfig:
    """Read the drafter's `config.json`, with `--json-model-override-args` applied as SGLang does.

    Raises:
        ConfigError: there is no such checkpoint, it is no DFlash drafter, or its fields make no sense.
    """
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
    """Return the drafter as its checkpoint describes it; raises what :func:`read_drafter` raises."""
    path = resolving_view(server_args).speculative_draft_model_path
    return DFlashConfig.from_dict(read_drafter(server_args).to_dict(), path)


def target_facts(server_args: ServerArgs) -> TargetFacts:
    """Return what the drafter must agree with, from SGLang's reading of the target's config."""
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


# Formats that any checkpoint on the hub can be loaded with.
_COMMON_FORMATS = ("auto", "safetensors", "pt", "npcache", "dummy", "fastsafetensors", "instanttensor")


def draft_load_format(server_args: ServerArgs) -> str | None:
    """Return the format of the drafter's weights; None: SGLang chooses it by the drafter's path.

    Without `--speculative-draft-load-format`, SGLang would take the target's, which may be of the target alone: GGUF,
    Mistral's, or shards of its tensors.
    """
    cfg = resolving_view(server_args)
    if cfg.speculative_draft_load_format is not None:
        return cfg.speculative_draft_load_format
    if is_runai_obj_uri(cfg.speculative_draft_model_path):
        return None
    if cfg.load_format in _COMMON_FORMATS:
        return cfg.load_format
    logger.info(
        "DFLASH loads the drafter as --speculative-draft-load-format auto: --load-format %s is the target's.",
        cfg.load_format,
    )
    return "auto"


def check_local_tensors(server_args: ServerArgs, drafter: DFlashConfig, load_format: str | None) -> None:
    """Check the drafter's tensors before the target is loaded, if they are in local safetensors files.

    Tensors of other checkpoints are checked when the drafter is loaded. A drafter's own embedding of the mask token is
    checked in any case.

    Args:
        load_format: of the drafter.
    """
    cfg = resolving_view(server_args)
    path = cfg.speculative_draft_model_path
    read_mask_embedding(drafter, cfg.speculative_draft_model_revision)
    if load_format in ("auto", "safetensors") and os.path.isdir(path) and safetensors_files(path):
        check_tensors(drafter, read_headers(path))


def check_context_length(server_args: ServerArgs, drafter: PretrainedConfig) -> None:
    """Refuse a drafter with a shorter context than the target's; SGLang's own message names no model."""
    served = model_config_of(server_args).context_len
    trained = get_context_length(drafter)
    if served > trained and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise ConfigError(
            f"max_position_embeddings={trained} of drafter {drafter._name_or_path} does not reach "
            f"the target's context of {served} tokens; set --context-length {trained}."
        )
