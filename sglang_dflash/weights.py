"""`/update_weights_from_disk`: a DFlash checkpoint updates the drafter, any other the target.

SGLang would load the one checkpoint that a request names into both.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from transformers import PretrainedConfig

from sglang_dflash import formats
from sglang_dflash.config import ConfigError, DFlashConfig
from sglang_dflash.inspect import read_drafter, tensor_shapes
from sglang_dflash.tensors import tensor_problems

logger = logging.getLogger(__name__)


def update_weights_from_disk(
    original, manager: SchedulerWeightUpdaterManager, recv_req: UpdateWeightFromDiskReqInput
) -> UpdateWeightFromDiskReqOutput:
    """AROUND `SchedulerWeightUpdaterManager.update_weights_from_disk`."""
    if not manager.scheduler.spec_algorithm.is_dflash() or not _is_drafter(recv_req.model_path):
        return original(manager, recv_req)
    success, message = manager.draft_worker.update_drafter(recv_req.model_path, recv_req.load_format)
    if success:
        manager.flush_cache_after_weight_update(recv_req)
    else:
        logger.error(message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


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
