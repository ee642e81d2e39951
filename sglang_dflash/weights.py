"""Weight updates: a DFlash checkpoint updates the drafter, everything else the target.

SGLang would load the one checkpoint that a request names into both, and so it would tensors that arrive without one.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace

from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from transformers import PretrainedConfig

from sglang_dflash import formats
from sglang_dflash.arguments import is_dflash
from sglang_dflash.config import ConfigError, DFlashConfig
from sglang_dflash.inspect import read_drafter, tensor_shapes
from sglang_dflash.tensors import tensor_problems

logger = logging.getLogger(__name__)

_ANSWERS = {
    BeginWeightUpdateReqInput: BeginWeightUpdateReqOutput,
    UpdateWeightsFromTensorReqInput: UpdateWeightsFromTensorReqOutput,
    UpdateWeightsFromDistributedReqInput: UpdateWeightsFromDistributedReqOutput,
}


def update_weights_from_disk(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightFromDiskReqInput
) -> UpdateWeightFromDiskReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.recapture_cuda_graph:
        message = "recapture_cuda_graph=true is not supported with DFLASH; its graphs read the new weights as they are."
        logger.error(message)
        return UpdateWeightFromDiskReqOutput(success=False, message=message, num_paused_requests=0)
    if not _is_drafter(recv_req.model_path):
        return original(replace(manager, draft_worker=None), recv_req)
    success, message = manager.draft_worker.update_drafter(recv_req.model_path, recv_req.load_format)
    if success:
        manager.record_weight_version_after_update(recv_req.weight_version)
        success, message = manager.flush_cache_after_weight_update(recv_req, success, message)
    if not success:
        logger.error(message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def update_weights_from_ipc(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightsFromIPCReqInput
) -> UpdateWeightsFromIPCReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_ipc`, which has the target's weights."""
    if manager.scheduler.spec_algorithm.is_dflash():
        manager = replace(manager, draft_worker=None)
    return original(manager, recv_req)


def update_weights_by_tensors(original, manager: SchedulerWeightUpdaterManager, recv_req):
    """AROUND `begin_weight_update`, `update_weights_from_tensor` and `update_weights_from_distributed` of
    `SchedulerWeightUpdaterManager`: no tensor is of both models, so without a choice it is the target's."""
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    if recv_req.selector == "draft":
        message = "selector=draft is not supported with DFLASH: its drafter is updated by /update_weights_from_disk."
        logger.error(message)
        return _ANSWERS[type(recv_req)](success=False, message=message)
    recv_req.selector = "target"
    return original(manager, recv_req)


def update_model_path_info(original, manager: TokenizerManager, model_path: str, load_format: str) -> None:
    """AROUND `TokenizerManager._update_model_path_info`: a server is not named after its drafter."""
    if not (is_dflash(manager.server_args) and _is_drafter(model_path)):
        original(manager, model_path, load_format)


def _is_drafter(path: str) -> bool:
    try:
        raw, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        # SGLang's own answer names the path.
        return False
    return formats.is_dflash(raw)


def differences(path: str, serving: DFlashConfig) -> list[str]:
    """What keeps a checkpoint from taking the place of the drafter that serves: fields and tensors that differ."""
    try:
        config, _ = read_drafter(path)
        if config != replace(serving, path=path):
            return [
                f"{field.name}={getattr(config, field.name)!r}, where {getattr(serving, field.name)!r} is served"
                for field in fields(DFlashConfig)
                if field.name != "path" and getattr(config, field.name) != getattr(serving, field.name)
            ]
        return tensor_problems(config, tensor_shapes(path))
    except ConfigError as error:
        return [str(error)]
