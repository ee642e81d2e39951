"""Rows of logits without a token to choose, and the requests that fail by them.

A row fails where its custom logit processor raises, where all logits are -inf, or where one is not a number. SGLang's
sampler ends the server over either. Here the row draws a harmless token, and the result says which request failed and
why. Nothing waits longer for it than for the tokens.
Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, T rows, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus

import torch
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.utils.common import async_d2h

# A logit of +inf, by which a processor may choose a token, would be NaN in the softmax. This one is still finite when
# divided by the smallest temperature; SGLang's `sanitize_nan_logits` takes the same.
MAX_LOGIT = 1e30


class RowChecks:
    """Failed rows of a sampler's last call."""

    def __init__(self) -> None:
        self._failed: torch.Tensor | None = None
        self._errors: dict[int, str] = {}

    def put(self, failed: torch.Tensor, errors: dict[int, str]) -> None:
        self._failed, self._errors = failed, errors

    def take(self) -> tuple[torch.Tensor | None, dict[int, str]]:
        """Return rows without a token to choose, [T] bool, and errors of processors by row; None: no row was drawn."""
        failed, errors = self._failed, self._errors
        self._failed, self._errors = None, {}
        return failed, errors


# By the samplers of DFLASH targets.
_checks: weakref.WeakKeyDictionary[Sampler, RowChecks] = weakref.WeakKeyDictionary()


def watch(sampler: Sampler) -> RowChecks:
    return _checks.setdefault(sampler, RowChecks())


def is_watched(sampler: Sampler) -> bool:
    """Return True for the sampler of a DFLASH target."""
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
        Error messages by row.
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
    """Failed requests of a batch, on their way to the scheduler.

    Attributes:
        num_tokens: [bs] int64 on the CPU, once `ready`. Committed tokens before the row that fails, or `num_rows`.
        num_rows: rows of a request: W, or 1 after a prefill.
        ready: event after which `num_tokens` is on the CPU; None: it is.
        errors: row and message of a processor's error, by request.
    """

    num_tokens: torch.Tensor
    num_rows: int
    ready: torch.Event | None
    errors: dict[int, tuple[int, str]]

    @classmethod
    def of(
        cls, failed_rows: torch.Tensor, accept_lens: torch.Tensor | None, errors: dict[int, tuple[int, str]]
    ) -> Failures:
        """Start to copy the failures of committed tokens to the CPU.

        Args:
            failed_rows: [bs, W] bool on the device.
            accept_lens: [bs]. Only the first rows of each request are of committed tokens; None: all of them are.
            errors: see the class.
        """
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
        """Yield the requests that failed, the tokens that each has before, and how it ends."""
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
