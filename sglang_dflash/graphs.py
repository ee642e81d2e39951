"""Work of ours that runs inside the CUDA graphs which SGLang captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner


class GraphTail:
    """A function recorded behind a model's forward in every captured graph, run directly where no graph is.

    `ModelRunner.capture_tail_hooks` calls it once for each warm-up and, last, for the capture, so what it returned
    then is the memory that a replay of that size fills. Holding it here keeps the graph pool from reusing it.
    """

    def __init__(self, runner: ModelRunner, function: Callable[[LogitsProcessorOutput, ForwardBatch], Any]) -> None:
        self._runner = runner
        self._function = function
        self._captured: dict[int, Any] = {}
        runner.capture_tail_hooks.append(self._capture)

    def _capture(self, graph_runner, output: LogitsProcessorOutput, forward_batch: ForwardBatch, num_tokens) -> None:
        self._captured[forward_batch.batch_size] = self._function(output, forward_batch)

    def replayed(self) -> Any:
        """What the last replay computed, for the padded batch size of its graph; the next replay overwrites it."""
        return self._captured[self._runner.decode_cuda_graph_runner.bs]

    def eager(self, output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> Any:
        return self._function(output, forward_batch)
