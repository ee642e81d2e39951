"""Answer administrative requests that fail with an error, and keep the server running.

SGLang's scheduler ends at the first exception that one of these requests raises. Some answers have no field for an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from fastapi import HTTPException
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    AttachHiCacheStorageReqOutput,
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    ConfigureLoggingReq,
    EndWeightUpdateReqInput,
    EndWeightUpdateReqOutput,
    ExpertDistributionReq,
    ExpertDistributionReqOutput,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    InitWeightsSendGroupForRemoteInstanceReqOutput,
    InitWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqOutput,
    ProfileReq,
    ProfileReqOutput,
    ProfileReqType,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    SendWeightsToRemoteInstanceReqInput,
    SendWeightsToRemoteInstanceReqOutput,
    SetInternalStateReq,
    SetInternalStateReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args.arguments import is_dflash, serves_dflash
from sglang_dflash.server_args.refusals import IGNORED, check_storage

logger = logging.getLogger(__name__)


class AdminError(Exception):
    """An administrative request is refused or has failed. The client gets the message."""


# Answers to failed requests, by type of the request.
_ANSWERS: dict[type, Callable] = {
    AttachHiCacheStorageReqInput: partial(AttachHiCacheStorageReqOutput, success=False),
    BeginWeightUpdateReqInput: partial(BeginWeightUpdateReqOutput, success=False),
    EndWeightUpdateReqInput: partial(EndWeightUpdateReqOutput, success=False),
    InitWeightsSendGroupForRemoteInstanceReqInput: partial(
        InitWeightsSendGroupForRemoteInstanceReqOutput, success=False
    ),
    InitWeightsUpdateGroupReqInput: partial(InitWeightsUpdateGroupReqOutput, success=False),
    SendWeightsToRemoteInstanceReqInput: partial(SendWeightsToRemoteInstanceReqOutput, success=False),
    UpdateWeightFromDiskReqInput: partial(UpdateWeightFromDiskReqOutput, success=False, num_paused_requests=0),
    UpdateWeightsFromDistributedReqInput: partial(UpdateWeightsFromDistributedReqOutput, success=False),
    UpdateWeightsFromIPCReqInput: partial(UpdateWeightsFromIPCReqOutput, success=False),
    UpdateWeightsFromTensorReqInput: partial(UpdateWeightsFromTensorReqOutput, success=False),
}
# Answers without a field for a message, or whose message HTTP does not show. `rid`, which is else empty, carries the
# message to `raise_errors`.
_MUTE_ANSWERS: dict[type, Callable] = {
    ExpertDistributionReq: ExpertDistributionReqOutput,
    ProfileReq: partial(ProfileReqOutput, success=False, message=""),
    ReleaseMemoryOccupationReqInput: ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput: ResumeMemoryOccupationReqOutput,
    SetInternalStateReq: partial(SetInternalStateReqOutput, updated=False),
}
# Valid values of `/configure_logging`, those of the flags with the same names.
_LOGGING = {
    "log_requests_level": (0, 1, 2, 3),
    "log_requests_format": ("text", "json"),
    "log_level": [name.lower() for name in logging.getLevelNamesMapping()],
}


def answer_errors(result, scheduler) -> None:
    """AFTER `Scheduler.init_request_dispatcher`: wrap the handlers of administrative requests."""
    if not scheduler.spec_algorithm.is_dflash():
        return
    handlers = scheduler._request_dispatcher._mapping
    attach = handlers[AttachHiCacheStorageReqInput]
    handlers[AttachHiCacheStorageReqInput] = partial(_attach_storage, attach, scheduler)
    for answers, field in ((_ANSWERS, "message"), (_MUTE_ANSWERS, "rid")):
        for request, answer in answers.items():
            handlers[request] = partial(_handle, handlers[request], answer, field)


def _attach_storage(
    attach: Callable, scheduler, recv_req: AttachHiCacheStorageReqInput
) -> AttachHiCacheStorageReqOutput:
    """Refuse a backend that is refused as a flag too."""
    try:
        check_storage(recv_req.hicache_storage_backend, scheduler.model_config, get_parallel().tp_size)
    except ConfigError as error:
        raise AdminError(str(error)) from error
    return attach(recv_req)


def _handle(handler: Callable, answer: Callable, field: str, recv_req: Any) -> Any:
    name = type(recv_req).__name__
    try:
        return handler(recv_req)
    except AdminError as error:
        logger.error("%s: %s", name, error)
        message = str(error)
    # SGLang's handlers raise exceptions of every type. None of them runs within a step, so the client gets the message,
    # and the log the traceback.
    except Exception as error:
        logger.exception("%s failed.", name)
        message = describe(error)
    return answer(**{field: message})


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def raise_errors(original, communicator: FanOutCommunicator, obj: Any) -> list:
    """AROUND `FanOutCommunicator.queueing_call`: raise a 400 with the message that such an answer carries."""
    results = await original(communicator, obj)
    if type(obj) in _MUTE_ANSWERS:
        for result in results:
            if result.rid is not None:
                raise HTTPException(status_code=400, detail=result.rid)
    return results


def configure_logging(original, manager: TokenizerManager, obj: ConfigureLoggingReq) -> None:
    """AROUND `TokenizerManager.configure_logging`: check all values first.

    SGLang would fail after it has changed some of them, and then fail to log every request.
    """
    if is_dflash(manager.server_args):
        level = obj.log_level and obj.log_level.lower()
        asked = obj.log_requests_level, obj.log_requests_format, level
        for (field, known), value in zip(_LOGGING.items(), asked, strict=True):
            if value is not None and value not in known:
                expected = ", ".join(map(str, known))
                raise HTTPException(status_code=400, detail=f"{field}={value!r} is invalid: give one of {expected}.")
    original(manager, obj)


def set_internal_state(
    original, controller: SchedulerInternalStateController, recv_req: SetInternalStateReq
) -> SetInternalStateReqOutput:
    """AROUND `SchedulerInternalStateController.set_internal_state`: refuse what is refused as a flag too."""
    if controller.scheduler.spec_algorithm.is_dflash():
        for name in recv_req.server_args:
            if name in IGNORED:
                raise AdminError(f"{name} is not supported with DFLASH.")
    return original(controller, recv_req)


def check_memory_tags(original, manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
    """AROUND `release_memory_occupation` and `resume_memory_occupation` of `SchedulerWeightUpdaterManager`: check tags.

    torch_memory_saver ends a process that releases or resumes memory twice. If one tag fails, SGLang has forgotten the
    tags before it. Resumed memory is not initialised, so `req_to_token` is zeroed: graphs read its row 0 for padding.
    """
    if not manager.scheduler.spec_algorithm.is_dflash():
        return original(manager, recv_req)
    recv_req.tags = list(dict.fromkeys(recv_req.tags or GPU_MEMORY_ALL_TYPES))
    is_release = isinstance(recv_req, ReleaseMemoryOccupationReqInput)
    for tag in recv_req.tags:
        if (tag in manager.offload_tags) == is_release:
            state = "is released already" if is_release else "is not released"
            raise AdminError(f"tags has {tag!r}, whose memory {state}. Released are {sorted(manager.offload_tags)}.")
    output = original(manager, recv_req)
    if not is_release and GPU_MEMORY_TYPE_KV_CACHE in recv_req.tags:
        manager.scheduler.req_to_token_pool.req_to_token.zero_()
    return output


def profile(original, manager: SchedulerProfilerManager, recv_req: ProfileReq) -> ProfileReqOutput:
    """AROUND `SchedulerProfilerManager._profile`: refuse a profile that would fail later, in a step."""
    if not serves_dflash():
        return original(manager, recv_req)
    if recv_req.req_type == ProfileReqType.START_PROFILE:
        _check_profile(recv_req)
    output = original(manager, recv_req)
    if not output.success:
        raise AdminError(output.message)
    return output


def _check_profile(recv_req: ProfileReq) -> None:
    activities = ["CPU", "GPU"] + ["MEM", "CUDA_PROFILER"] * torch.cuda.is_available()
    for activity in recv_req.activities or []:
        if activity not in activities:
            raise AdminError(f"Unknown activity {activity!r}: give some of {', '.join(activities)}.")
    if recv_req.profile_by_stage and not recv_req.num_steps:
        raise AdminError(f"num_steps={recv_req.num_steps} is invalid with profile_by_stage: give the steps per stage.")
    for name in ("profile_prefix", "profile_id"):
        if "/" in (getattr(recv_req, name) or ""):
            raise AdminError(f"{name}={getattr(recv_req, name)!r} has a slash: give a part of a file name.")
    if recv_req.output_dir is not None:
        try:
            folder = Path(recv_req.output_dir).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except (OSError, RuntimeError, ValueError) as error:
            raise AdminError(f"output_dir={recv_req.output_dir!r} cannot be written to: {error}") from error
