"""A request that fails while it is served ends alone, with an error that says why, and the others of its batch go on.

It fails where its custom logit processor raises, and where no token is left to choose: all of a row's logits are -inf,
or one is not a number. SGLang's sampler ends the server over either. Here the row draws a harmless token, and the
request is ended there when the scheduler reads the result, for which nothing waits longer than for the tokens, unless
it has come to an end before.
Shapes: bs requests, B rows of a block, T rows, V tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus

import torch
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.utils.common import async_d2h

from sglang_dflash.requests import finishing

# A logit of +inf, by which a processor may choose a token, would be NaN in the softmax. This one is still finite when
# divided by the smallest temperature; SGLang's `sanitize_nan_logits` takes the same.
MAX_LOGIT = 1e30


class RowChecks:
    """What was wrong with the rows of a sampler's last call."""

    def __init__(self) -> None:
        self._failed: torch.Tensor | None = None
        self._errors: dict[int, str] = {}

    def put(self, failed: torch.Tensor, errors: dict[int, str]) -> None:
        self._failed, self._errors = failed, errors

    def take(self) -> tuple[torch.Tensor | None, dict[int, str]]:
        """[T] bool, rows without a token to choose, and errors of processors by row; None where none were drawn."""
        failed, errors = self._failed, self._errors
        self._failed, self._errors = None, {}
        return failed, errors


# Of the samplers of DFLASH targets.
_checks: weakref.WeakKeyDictionary[Sampler, RowChecks] = weakref.WeakKeyDictionary()


def watch(sampler: Sampler) -> RowChecks:
    return _checks.setdefault(sampler, RowChecks())


def is_watched(sampler: Sampler) -> bool:
    """Whether it is the sampler of a DFLASH target."""
    return sampler in _checks


def preprocess_logits(
    original, sampler: Sampler, logits: torch.Tensor, sampling_info: SamplingBatchInfo
) -> torch.Tensor:
    """AROUND `Sampler._preprocess_logits`: [T, V] logits, changed in place, so that every row has a token to draw."""
    checks = _checks.get(sampler)
    if checks is None:
        return original(sampler, logits, sampling_info)
    errors = {}
    if sampling_info.has_custom_logit_processor:
        errors = apply_processors(logits, sampling_info)
        sampling_info = replace(sampling_info, has_custom_logit_processor=False)
    logits.clamp_(max=MAX_LOGIT)
    # The largest of values with a NaN is NaN.
    failed = ~(logits.amax(dim=-1) > -torch.inf)
    logits.masked_fill_(failed[:, None], 0)
    checks.put(failed, errors)
    return original(sampler, logits, sampling_info)


def apply_processors(logits: torch.Tensor, info: SamplingBatchInfo) -> dict[int, str]:
    """Apply custom logit processors as `apply_custom_logit_processor` does, each request's on its own if one fails.

    Args:
        logits: [bs, V], changed in place; -inf in rows whose processor fails.

    Returns:
        what went wrong, by row.
    """
    errors = {}
    for key, entry in info.custom_logit_processor.items():
        if _apply(logits, info, key, entry) is None:
            continue
        # One processor has the rows of every request that brought it.
        for i, row in enumerate(entry.rows):
            error = _apply(logits, info, key, ProcessorEntry(entry.processor, [row], entry.indices[i : i + 1]))
            if error is not None:
                errors[row] = f"custom_logit_processor failed: {type(error).__name__}: {error}"
                logits[row].fill_(-torch.inf)
    return errors


def _apply(logits: torch.Tensor, info: SamplingBatchInfo, key: int, entry: ProcessorEntry) -> Exception | None:
    try:
        apply_custom_logit_processor(logits, replace(info, custom_logit_processor={key: entry}))
    except Exception as error:  # A stranger's code may raise anything.
        return error
    return None


@dataclass
class Failures:
    """Which requests of a batch failed, on its way to the scheduler.

    Attributes:
        num_tokens: [bs] int64 on the CPU, once `ready`: committed tokens before the row that fails, or `num_rows`.
        num_rows: of a block.
        errors: of processors: row of the block and message, by request.
    """

    num_tokens: torch.Tensor
    num_rows: int
    ready: torch.Event | None
    errors: dict[int, tuple[int, str]]

    @classmethod
    def of(
        cls, failed_rows: torch.Tensor, accept_lens: torch.Tensor | None, errors: dict[int, tuple[int, str]]
    ) -> Failures:
        """Of [bs, B] bool on the device, of which the first `accept_lens`, [bs], are those of committed tokens; None
        stands for one of each. Starts its way to the CPU."""
        num_rows = failed_rows.shape[1]
        rows = torch.arange(num_rows, device=failed_rows.device)
        if accept_lens is not None:
            failed_rows = failed_rows & (rows < accept_lens[:, None])
        num_tokens = torch.where(failed_rows, rows, num_rows).amin(dim=1)
        host, ready = async_d2h(num_tokens), None
        if num_tokens.device.type != "cpu":
            ready = torch.get_device_module(num_tokens.device).Event()
            ready.record()
        return cls(host, num_rows, ready, errors)

    def of_requests(self, reqs: list[Req]) -> Iterator[tuple[Req, int, FINISH_ABORT]]:
        """The requests that failed, how many tokens of its block each has before that, and how it ends."""
        if self.ready is not None:
            self.ready.synchronize()
        for i, (req, num_tokens) in enumerate(zip(reqs, self.num_tokens.tolist(), strict=True)):
            if num_tokens < self.num_rows:
                row, error = self.errors.get(i, (0, None))
                yield req, num_tokens, _reason(req, error if row == num_tokens else None)


def _reason(req: Req, error: str | None) -> FINISH_ABORT:
    if error is not None:
        return FINISH_ABORT(error, HTTPStatus.BAD_REQUEST, "BadRequestError")
    params = req.sampling_params
    asked = {
        "its grammar": req.grammar is not None,
        "min_new_tokens": params.min_new_tokens,
        "logit_bias": params.logit_bias,
        "custom_logit_processor": req.custom_logit_processor,
        "input_embeds": req.input_embeds is not None,
    }
    causes = " and ".join(name for name, is_asked in asked.items() if is_asked)
    if causes:
        message = f"No token is left to choose: all are ruled out by {causes}."
        return FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
    message = "The target's logits are not numbers."
    return FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def _failures(result: GenerationBatchResult) -> Failures | None:
    return next((ref for ref in result.extra_keep_alive_refs or () if isinstance(ref, Failures)), None)


def fail_prefilled(processor, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """BEFORE `SchedulerBatchResultProcessor.process_batch_result_prefill`, which drops the output of such a request."""
    if not batch.spec_algorithm.is_dflash():
        return
    failures = _failures(result)
    if failures is None:
        return
    for req, _, reason in failures.of_requests(batch.reqs):
        # What the middle of a prompt would be followed by is not looked at. A retracted one is prefilled again, and
        # would end for a reason that is no longer there.
        if req.inflight_middle_chunks <= 0 and not (req.finished() or req.is_retracted):
            req.discard_output_reason = reason


def fail_decoded(tokens: list[list[int]], processor, result: GenerationBatchResult, batch: ScheduleBatch) -> None:
    """AFTER `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`, where a grammar has refused the harmless token."""
    if not batch.spec_algorithm.is_dflash():
        return
    failures = _failures(result)
    if failures is None:
        return
    for req, num_tokens, reason in failures.of_requests(batch.reqs):
        # A retracted one writes these tokens again.
        if not (req.finished() or req.is_retracted):
            finishing.fail(req, num_tokens, reason)
