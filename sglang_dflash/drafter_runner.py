"""Builds the drafter's `TpModelWorker` the way SGLang 0.5.17 wants it: the version-dependent part of the worker."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.runtime_context import get_context, get_schedule
from sglang.srt.server_args import ServerArgs


def build_draft_worker(
    server_args: ServerArgs, gpu_id: int, ps: ParallelState, nccl_port: int, target_worker: TpModelWorker
) -> TpModelWorker:
    """A worker for the drafter checkpoint, on its own attention backend, with the target's context length and dtype.

    Its KV pool has the dtype that :func:`draft_kv_dtype` says.
    """
    backend = server_args.speculative_draft_attention_backend
    draft_args = deepcopy(server_args)
    draft_args.override(
        "sglang_dflash.draft_worker",
        skip_tokenizer_init=True,
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        # A checkpoint may name another dtype, or none.
        dtype=str(target_worker.model_runner.dtype).removeprefix("torch."),
        context_length=target_worker.model_runner.model_config.context_len,
        # Of the target's layers: the drafter's scales are 1.
        quantization_param_path=None,
        load_format=server_args.speculative_draft_load_format or server_args.load_format,
        # The target's resolved value lives in the schedule, not in its arguments.
        disable_chunked_prefix_cache=get_schedule().disable_chunked_prefix_cache,
    )
    # Layers read the process-wide configuration while they are built; theirs must be the drafter's.
    with get_context().preserve_config():
        get_context().set_server_args(draft_args)
        worker = TpModelWorker(
            server_args=draft_args,
            gpu_id=gpu_id,
            ps=replace(ps, pp_rank=0),
            nccl_port=nccl_port,
            is_draft_worker=True,
        )
    # `BaseSpecWorker` reads graph memory and weights of its drafter under this name.
    worker.draft_runner = worker.model_runner
    return worker


def draft_kv_dtype(server_args: ServerArgs, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that SGLang gives the drafter's KV pool: what `--kv-cache-dtype` names; the model's with "auto"."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=server_args.kv_cache_dtype,
        # A quantised checkpoint may name a KV dtype; the drafter is not quantised.
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=True,
        is_dflash=True,
        speculative_draft_attention_backend=server_args.speculative_draft_attention_backend,
    )
    return dtype
