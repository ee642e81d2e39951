"""Builds the drafter's `TpModelWorker` the way SGLang 0.5.23 wants it: the version-dependent part of the worker."""

from __future__ import annotations

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_model, get_spec
from sglang.srt.server_args import ServerArgs


def draft_model_config(server_args: ServerArgs, context_length: int, dtype: torch.dtype) -> ModelConfig:
    """Return the drafter's `ModelConfig`, with the target's context length and dtype.

    A checkpoint may name another dtype, or none.
    """
    config = ModelConfig.from_server_args(
        server_args,
        model_path=get_spec().speculative_draft_model_path,
        model_revision=get_spec().speculative_draft_model_revision,
        is_draft_model=True,
        context_length=context_length,
    )
    config.dtype = dtype
    return config


class DraftModelWorker(TpModelWorker):
    """A worker for the drafter's checkpoint, on its own attention backend."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target: ModelRunner, random_seed: int
    ) -> None:
        self._target = target
        # The file has KV scales of the target's layers. The drafter's are 1.
        with get_model().override(quantization_param_path=None), draft_model_build_scope():
            super().__init__(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                draft_attention_backend=get_spec().speculative_draft_attention_backend,
                random_seed=random_seed,
            )
        # `BaseSpecWorker` reads graph memory and weights of its drafter under this name.
        self.draft_runner = self.model_runner

    def _init_model_config(self) -> None:
        self.model_config = draft_model_config(
            self.server_args, self._target.model_config.context_len, self._target.dtype
        )
