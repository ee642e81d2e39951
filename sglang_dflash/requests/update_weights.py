"""Weight updates: a DFlash checkpoint updates the drafter, everything else updates the target.

SGLang would load the checkpoint or the tensors of a request into both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import (
    EndWeightUpdateReqInput,
    EndWeightUpdateReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_memory, get_model, get_parallel, get_spec
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers import PretrainedConfig

from sglang_dflash import cpu_support
from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.mask_embedding import FILE, read_mask_embedding
from sglang_dflash.checkpoint.tensors import read_headers, tensor_problems
from sglang_dflash.errors import ConfigError
from sglang_dflash.inspect import read_drafter
from sglang_dflash.ops import weight_copy
from sglang_dflash.requests.admin import AdminError, describe
from sglang_dflash.server_args.arguments import is_dflash, serves_dflash

logger = logging.getLogger(__name__)

_NOTHING_LOADED = "Nothing was loaded."
_PARTLY_LOADED = "Some tensors may have been loaded: the weights are mixed until an update of all of them succeeds."

# Beginnings of SGLang's messages for updates that fail before anything is loaded.
_BEFORE_LOADING = (
    "Failed to get weights iterator",
    "Failed to get model loader",
    "IPC weight update failed: ImportError",
    "Online weight updates are not supported",
)


def update_weights_from_disk(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightFromDiskReqInput
) -> UpdateWeightFromDiskReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`: update target or drafter, by the checkpoint."""
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.recapture_cuda_graph:
        raise AdminError(
            "recapture_cuda_graph=true is not supported with DFLASH: leave it out, as its graphs read the new weights."
        )
    check_load_format(recv_req.load_format.lower(), [load_format.value for load_format in LoadFormat])
    path = recv_req.model_path
    raw = _config_of(path)
    # Reading from a hub may fail on one rank only.
    if not any(_of_all_ranks(formats.is_dflash(raw))):
        _check_target(path, raw.get("architectures"), manager.tp_worker.model_runner.model_config)
        return original(_without_drafter(manager), recv_req)
    serving = manager.draft_worker.draft_model_runner.model.dflash_config
    if serving.quantization is not None:
        raise AdminError(
            f"model_path={path} cannot replace the drafter that is served: its checkpoint has float8 weights "
            f"({serving.path}), whose layout changes when they are loaded."
        )
    quantization = get_spec().speculative_draft_model_quantization
    if quantization is not None:
        raise AdminError(
            f"model_path={path} cannot replace the drafter that is served: its weights were quantised when they were "
            f"loaded (--speculative-draft-model-quantization {quantization})."
        )
    if manager.scheduler.enable_hicache_storage:
        raise AdminError(
            f"model_path={path} cannot replace the drafter that is served: the KV in --hicache-storage-backend "
            f"{get_memory().hicache_storage_backend} is the served drafter's. Detach the storage first."
        )
    for problems in _of_all_ranks(receive_on_all_ranks(differences, path, serving)):
        if problems:
            reasons = "; ".join(problems).rstrip(".")
            raise AdminError(f"model_path={path} cannot replace the drafter that is served: {reasons}.")
    # It raises AdminError if it fails.
    with manager._observe_weight_load("disk"):
        success, message = manager.draft_worker.update_drafter(path, recv_req.load_format)
    manager.record_weight_version_after_update(recv_req.weight_version)
    success, message = manager.flush_cache_after_weight_update(recv_req, success, message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def update_weights_from_ipc(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightsFromIPCReqInput
) -> UpdateWeightsFromIPCReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_ipc`: update the target only."""
    if manager.scheduler.spec_algorithm.is_dflash():
        manager = _without_drafter(manager)
    return original(manager, recv_req)


def update_weights_by_tensors(original, manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
    """AROUND three methods of `SchedulerWeightUpdaterManager`: update the target only.

    They are `begin_weight_update`, `update_weights_from_tensor` and `update_weights_from_distributed`.
    """
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.selector == "draft":
        raise AdminError(
            "selector=draft is not supported with DFLASH: update the drafter by /update_weights_from_disk."
        )
    if isinstance(recv_req, UpdateWeightsFromTensorReqInput) and recv_req.load_format is not None:
        loaders = manager.tp_worker.model_runner.weight_updater.custom_weight_loaders
        check_load_format(recv_req.load_format, ["direct", "flattened_bucket", *loaders])
    recv_req.selector = "target"
    return original(manager, recv_req)


def _without_drafter(manager: SchedulerWeightUpdaterManager) -> SchedulerWeightUpdaterManager:
    # `dataclasses.replace` needs every field, but `resume_memory_occupation` deletes one.
    of_target = copy(manager)
    of_target.draft_worker = None
    return of_target


def check_load_format(load_format: str, known: list[str]) -> None:
    if load_format not in known:
        raise AdminError(f"Unknown load_format {load_format!r}: give one of {', '.join(known)}. {_NOTHING_LOADED}")


def receive_on_all_ranks(original: Callable, *args, **kwargs) -> Any:
    """AROUND `BaseTpWorker.deserialize_own_rank` and `WeightUpdater.receive_weights_from_distributed`.

    If one rank cannot read its tensors, no rank loads any.
    """
    if not serves_dflash():
        return original(*args, **kwargs)
    tensors, problem = None, None
    try:
        tensors = original(*args, **kwargs)
    # Unpickling may raise anything.
    except Exception as error:
        logger.exception("The tensors of a weight update cannot be read.")
        problem = describe(error)
    _agree(problem, has_loaded=False)
    return tensors


def load_on_all_ranks(original: Callable, *args, **kwargs) -> tuple[bool, str]:
    """AROUND the methods of `WeightUpdater` that load weights: an update that fails on one rank fails on all.

    Otherwise ranks would go on with different caches, or wait for each other forever.
    """
    if not serves_dflash():
        return original(*args, **kwargs)
    try:
        success, message = original(*args, **kwargs)
        has_loaded = success or not message.startswith(_BEFORE_LOADING)
    # Loaders of models, or the one that the request names, raise anything for wrong names, shapes and files.
    except Exception as error:
        logger.exception("A weight update failed.")
        success, message, has_loaded = False, describe(error), True
    _weights_have_changed()
    _agree(None if success else message, has_loaded)
    return success, message


def end_weight_update(
    original, manager: SchedulerWeightUpdaterManager, recv_req: EndWeightUpdateReqInput
) -> EndWeightUpdateReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.end_weight_update`: drop copies of weights.

    Another process may have written the weights (RDMA), past every loader.
    """
    try:
        return original(manager, recv_req)
    finally:
        if manager.scheduler.spec_algorithm.is_dflash():
            _weights_have_changed()


def _weights_have_changed() -> None:
    cpu_support.weights_have_changed()
    weight_copy.weights_have_changed()


def _agree(problem: str | None, has_loaded: bool) -> None:
    """Raise :class:`AdminError` on every rank if one of them has a problem."""
    ranks = _of_all_ranks((problem, has_loaded))
    problems = {rank: problem for rank, (problem, _) in enumerate(ranks) if problem is not None}
    if problems:
        same = len(problems) == len(ranks) and len(set(problems.values())) == 1
        message = problems[0] if same else "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        state = _PARTLY_LOADED if any(has_loaded for _, has_loaded in ranks) else _NOTHING_LOADED
        raise AdminError(f"{message.rstrip('.')}. {state}")


def _of_all_ranks(value: Any) -> list:
    """Return the values of all tensor-parallel ranks, in their order."""
    return get_parallel().tp_group.all_gather_object(value)


def update_model_path_info(original, manager: TokenizerManager, model_path: str, load_format: str) -> None:
    """AROUND `TokenizerManager._update_model_path_info`: keep the path of the target after an update of the drafter."""
    if not (is_dflash(manager.server_args) and formats.is_dflash(_config_of(model_path))):
        original(manager, model_path, load_format)


def _check_target(path: str, names: list[str] | None, serving: ModelConfig) -> None:
    """Raise AdminError unless a checkpoint with these architectures can be the target's.

    SGLang would load any checkpoint whose tensors have the target's names.
    """
    problem = None
    # SGLang renames the architecture of some targets.
    known = [serving.hf_config.architectures, _config_of(serving.model_path).get("architectures")]
    # SGLang itself resolves a path that is no folder, or answers that it does not exist.
    if names not in known and (names is not None or Path(path).is_dir()):
        problem = (
            f"model_path={path} is a checkpoint neither of the drafter nor of the target: its config.json has "
            f"architectures={names}, and {known[0]} is served"
        )
    _agree(problem, has_loaded=False)


def _config_of(path: str) -> dict[str, Any]:
    """Return the config of a checkpoint; empty if there is none, which SGLang's own answer reports."""
    try:
        return formats.read_config(path)
    except (OSError, ValueError):
        return {}


def _served_config(path: str) -> PretrainedConfig:
    model = get_model()
    overrides = json.loads(model.json_model_override_args)
    return get_config(path, trust_remote_code=model.trust_remote_code, model_override_args=overrides)


def differences(path: str, serving: DFlashConfig) -> list[str]:
    """Return the reasons why a checkpoint cannot replace the drafter: fields and tensors that differ."""
    try:
        # This raises a readable error for a wrong config. SGLang's function applies --json-model-override-args.
        read_drafter(path)
        config = DFlashConfig.from_dict(_served_config(path).to_dict(), path)
        if config != replace(serving, path=path):
            return [
                f"{field.name}={getattr(config, field.name)!r}, but {getattr(serving, field.name)!r} is served"
                for field in fields(DFlashConfig)
                if field.name != "path" and getattr(config, field.name) != getattr(serving, field.name)
            ]
        if read_mask_embedding(config) is not None or read_mask_embedding(serving) is not None:
            return [f"its own embedding of the mask token ({FILE}), which an update would leave as it is"]
        return tensor_problems(config, read_headers(path))
    except ConfigError as error:
        return [str(error)]
