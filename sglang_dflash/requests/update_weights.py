"""Weight updates: a DFlash checkpoint updates the drafter, everything else the target.

SGLang would load the one checkpoint that a request names into both, and so it would tensors that arrive without one.
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
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers import PretrainedConfig

from sglang_dflash import cpu_support
from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.tensors import read_headers, tensor_problems
from sglang_dflash.draft import shortlist
from sglang_dflash.errors import ConfigError
from sglang_dflash.inspect import read_drafter
from sglang_dflash.requests.admin import AdminError, describe
from sglang_dflash.server_args.arguments import is_dflash, serves_dflash

logger = logging.getLogger(__name__)

_NOTHING_LOADED = "Nothing was loaded."
_PARTLY_LOADED = "Some tensors may have been loaded: the weights are mixed until an update of all of them succeeds."

# How SGLang's messages begin where it has not loaded anything yet.
_BEFORE_LOADING = (
    "Failed to get weights iterator",
    "Failed to get model loader",
    "IPC weight update failed: ImportError",
    "Online weight updates are not supported",
)


def update_weights_from_disk(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightFromDiskReqInput
) -> UpdateWeightFromDiskReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.recapture_cuda_graph:
        raise AdminError(
            "recapture_cuda_graph=true is not supported with DFLASH; its graphs read the new weights as they are."
        )
    check_load_format(recv_req.load_format.lower(), [load_format.value for load_format in LoadFormat])
    path = recv_req.model_path
    raw = _config_of(path)
    # A hub may fail on one rank alone.
    if not any(_of_all_ranks(formats.is_dflash(raw))):
        _check_target(path, raw.get("architectures"), manager.tp_worker.model_runner.model_config)
        return original(_without_drafter(manager), recv_req)
    serving = manager.draft_worker.draft_model_runner.model.dflash_config
    for problems in _of_all_ranks(receive_on_all_ranks(differences, path, serving)):
        if problems:
            reasons = "; ".join(problems).rstrip(".")
            raise AdminError(f"drafter {path} cannot take the place of the one that serves: {reasons}.")
    # It raises what keeps it from being updated.
    with manager._observe_weight_load("disk"):
        success, message = manager.draft_worker.update_drafter(path, recv_req.load_format)
    manager.record_weight_version_after_update(recv_req.weight_version)
    success, message = manager.flush_cache_after_weight_update(recv_req, success, message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def update_weights_from_ipc(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightsFromIPCReqInput
) -> UpdateWeightsFromIPCReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_ipc`, which has the target's weights."""
    if manager.scheduler.spec_algorithm.is_dflash():
        manager = _without_drafter(manager)
    return original(manager, recv_req)


def update_weights_by_tensors(original, manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
    """AROUND `begin_weight_update`, `update_weights_from_tensor` and `update_weights_from_distributed` of
    `SchedulerWeightUpdaterManager`: no tensor is of both models, so without a choice it is the target's."""
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.selector == "draft":
        raise AdminError(
            "selector=draft is not supported with DFLASH: its drafter is updated by /update_weights_from_disk."
        )
    if isinstance(recv_req, UpdateWeightsFromTensorReqInput) and recv_req.load_format is not None:
        loaders = manager.tp_worker.model_runner.weight_updater.custom_weight_loaders
        check_load_format(recv_req.load_format, ["direct", "flattened_bucket", *loaders])
    recv_req.selector = "target"
    return original(manager, recv_req)


def _without_drafter(manager: SchedulerWeightUpdaterManager) -> SchedulerWeightUpdaterManager:
    # `dataclasses.replace` wants every field, and `resume_memory_occupation` deletes one.
    of_target = copy(manager)
    of_target.draft_worker = None
    return of_target


def check_load_format(load_format: str, known: list[str]) -> None:
    if load_format not in known:
        raise AdminError(f"load_format={load_format!r} is none of {', '.join(known)}. {_NOTHING_LOADED}")


def receive_on_all_ranks(original: Callable, *args, **kwargs) -> Any:
    """AROUND `BaseTpWorker.deserialize_own_rank` and `WeightUpdater.receive_weights_from_distributed`: tensors that one
    rank cannot read are loaded by none."""
    if not serves_dflash():
        return original(*args, **kwargs)
    tensors, problem = None, None
    try:
        tensors = original(*args, **kwargs)
    # A pickle raises what it likes.
    except Exception as error:
        logger.exception("The tensors of a weight update cannot be read.")
        problem = describe(error)
    _agree(problem, has_loaded=False)
    return tensors


def load_on_all_ranks(original: Callable, *args, **kwargs) -> tuple[bool, str]:
    """AROUND the methods of `WeightUpdater` that load weights: an update that fails on one rank has failed on all.
    Ranks that part would go on with different caches, or wait for each other forever."""
    if not serves_dflash():
        return original(*args, **kwargs)
    try:
        success, message = original(*args, **kwargs)
        has_loaded = success or not message.startswith(_BEFORE_LOADING)
    # What is wrong with names, shapes and files shows in the loaders of models, or in one that the request names.
    except Exception as error:
        logger.exception("A weight update failed.")
        success, message, has_loaded = False, describe(error), True
    _weights_have_changed()
    _agree(None if success else message, has_loaded)
    return success, message


def end_weight_update(
    original, manager: SchedulerWeightUpdaterManager, recv_req: EndWeightUpdateReqInput
) -> EndWeightUpdateReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.end_weight_update`: what another process has written into weights (RDMA)
    came past every loader."""
    try:
        return original(manager, recv_req)
    finally:
        if manager.scheduler.spec_algorithm.is_dflash():
            _weights_have_changed()


def _weights_have_changed() -> None:
    cpu_support.weights_have_changed()
    shortlist.weights_have_changed()


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
    """What each tensor-parallel rank has here."""
    return get_parallel().tp_group.all_gather_object(value)


def update_model_path_info(original, manager: TokenizerManager, model_path: str, load_format: str) -> None:
    """AROUND `TokenizerManager._update_model_path_info`: a server is not named after its drafter."""
    if not (is_dflash(manager.server_args) and formats.is_dflash(_config_of(model_path))):
        original(manager, model_path, load_format)


def _check_target(path: str, names: list[str] | None, serving: ModelConfig) -> None:
    """SGLang would load what has the names of the target's tensors, whatever it is; names: its architectures."""
    problem = None
    # SGLang calls some targets otherwise than their checkpoints do.
    known = [serving.hf_config.architectures, _config_of(serving.model_path).get("architectures")]
    # What is no folder, SGLang finds, or says that it is not there.
    if names not in known and (names is not None or Path(path).is_dir()):
        problem = (
            f"{path} is a checkpoint neither of the drafter nor of the target: architectures={names} in its "
            f"config.json, where {known[0]} is served"
        )
    _agree(problem, has_loaded=False)


def _config_of(path: str) -> dict[str, Any]:
    """Empty where there is none: SGLang's own answer names the path."""
    try:
        return formats.read_config(path)
    except (OSError, ValueError):
        return {}


def _served_config(path: str) -> PretrainedConfig:
    model = get_model()
    overrides = json.loads(model.json_model_override_args)
    return get_config(path, trust_remote_code=model.trust_remote_code, model_override_args=overrides)


def differences(path: str, serving: DFlashConfig) -> list[str]:
    """What keeps a checkpoint from taking the place of the drafter that serves: fields and tensors that differ."""
    try:
        # What is wrong with it has a sentence here; SGLang's own way applies --json-model-override-args.
        read_drafter(path)
        config = DFlashConfig.from_dict(_served_config(path).to_dict(), path)
        if config != replace(serving, path=path):
            return [
                f"{field.name}={getattr(config, field.name)!r}, where {getattr(serving, field.name)!r} is served"
                for field in fields(DFlashConfig)
                if field.name != "path" and getattr(config, field.name) != getattr(serving, field.name)
            ]
        return tensor_problems(config, read_headers(path))
    except ConfigError as error:
        return [str(error)]
