"""A drafter's own embedding of the mask token: `mask_embedding.pt`, a file next to the weights.

NVIDIA NeMo trains such a row. Only the drafter's blocks have it. The target's row stays as it is.
"""

from __future__ import annotations

import functools
import logging
import pickle

import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers.utils.hub import cached_file

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "mask_embedding.pt"


def read_mask_embedding(config: DFlashConfig, revision: str | None = None) -> torch.Tensor | None:
    """Return the embedding, [H] float32 on the CPU; None: the checkpoint has no such file, or it cannot be looked up.

    Args:
        config: of the drafter. Its `path` is a folder, or a repository of the Hugging Face hub.
        revision: of the repository.

    Raises:
        ConfigError: the file cannot be read, or does not fit the config.
    """
    try:
        path = cached_file(config.path, FILE, revision=revision, _raise_exceptions_for_gated_repo=False)
    except OSError as error:
        # Most drafters have no such file, so servers start without the hub, too.
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            _warn_once(config.path)
        elif not isinstance(error.__cause__, EntryNotFoundError | None):
            raise ConfigError(f"{FILE} of drafter {config.path} cannot be read: {_one_line(error)}") from error
        return None
    if path is None:
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigError(f"{FILE} of drafter {config.path} cannot be read: {_one_line(error)}") from error
    if not isinstance(found, dict) or not isinstance(found.get("embedding"), torch.Tensor):
        raise ConfigError(f"{FILE} of drafter {config.path}: expected a dict with a tensor under 'embedding'.")
    if found.get("per_position"):
        raise ConfigError(
            f"{FILE} of drafter {config.path} has per_position={found['per_position']!r}: expected one embedding for "
            "all positions."
        )
    token, embedding = found.get("mask_token_id"), found["embedding"]
    if token not in (None, config.mask_token_id):
        raise ConfigError(
            f"{FILE} of drafter {config.path} has mask_token_id={token!r}, and its config.json {config.mask_token_id}."
        )
    if embedding.shape != (config.hidden_size,) or not embedding.is_floating_point():
        raise ConfigError(
            f"{FILE} of drafter {config.path} has an embedding {list(embedding.shape)} in {embedding.dtype}: expected "
            f"[{config.hidden_size}] floating-point numbers."
        )
    return embedding.float()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@functools.cache
def _warn_once(path: str) -> None:
    logger.warning(
        "The hub was not asked whether drafter %s has a %s. The target's embedding of the mask token is used.",
        path,
        FILE,
    )
