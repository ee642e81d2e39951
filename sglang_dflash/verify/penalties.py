"""Penalties of a request's own output, and suppression of stop tokens before `min_new_tokens`.

SGLang counts output tokens when the scheduler has seen them. Under overlap scheduling that is one step too late, and a
block needs a count for each of its tokens. So tokens are counted here on the device, as they are accepted.

Shapes: bs requests, W tokens of each block, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import async_h2d

from sglang_dflash import ops
from sglang_dflash.ops.token_penalties import penalties_of
from sglang_dflash.types import Acceptance


def are_penalised(info: SamplingBatchInfo) -> bool:
    """Return whether any request of a running batch has a penalty or `min_new_tokens`."""
    return info.acc_additive_penalties is not None


def is_penalised(params: SamplingParams) -> bool:
    """Return whether a request has a penalty or `min_new_tokens`."""
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )


class Penalties:
    """Penalties of all running requests, and the token counts that they depend on."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        # [num_slots, V]. Allocated before SGLang sizes its pools by the memory that is left.
        self._counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def prepare_prefill(self, batch: ScheduleBatch) -> None:
        """Make the batch's penalties those of the whole output, before a prefill draws a token of each request.

        SGLang's own penalties begin at zero with every prefill. That is wrong for requests that were retracted, and for
        requests that decode in a mixed batch.
        """
        num_decoding = len(batch.decoding_reqs or [])
        if not num_decoding and not any(req.output_ids for req in batch.reqs):
            return
        self._count_outputs(batch)
        parameters = _Parameters.of(batch.reqs, self._device)
        info = batch.sampling_info
        info.acc_additive_penalties, info.acc_scaling_penalties = penalties_of(
            self._counts[batch.req_pool_indices], parameters.frequency, parameters.presence, parameters.repetition
        )
        prompt_lens = self._tensor([len(req.origin_input_ids) for req in batch.reqs])
        # The output of a retracted request is prefilled again. A decoding request has KV of all but its last token.
        generated = (batch.seq_lens - prompt_lens).clamp(min=0)
        parameters.suppress_stop_tokens(info.acc_additive_penalties[:, None], generated)

    def begin(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Begin the counts of requests with their first token.

        Args:
            next_token_ids: [bs]. Of a prompt that is not prefilled to its end it means nothing. The next chunk begins
                anew.
        """
        self._count_outputs(batch)
        self.count(batch.req_pool_indices, next_token_ids)

    def begin_transferred(self, batch: ScheduleBatch) -> None:
        """Begin the counts of requests that another server has prefilled. Their first token is in their output."""
        self._count_outputs(batch)

    def _count_outputs(self, batch: ScheduleBatch) -> None:
        """Count what requests generated before they were retracted.

        Requests that decode in a mixed batch, its last ones, keep their counts, which are ahead of the scheduler's.
        """
        num_prefills = len(batch.reqs) - len(batch.decoding_reqs or [])
        slots, reqs = batch.req_pool_indices[:num_prefills], batch.reqs[:num_prefills]
        self._counts[slots] = 0
        tokens = [token for req in reqs for token in req.output_ids]
        if tokens:
            of_request = [i for i, req in enumerate(reqs) for _ in req.output_ids]
            self.count(slots[self._tensor(of_request)], self._tensor(tokens))

    def count(self, slots: torch.Tensor, tokens: torch.Tensor, is_counted: torch.Tensor | None = None) -> None:
        """Count tokens of requests.

        Args:
            slots: rows of `req_to_token`. Any shape that broadcasts to that of `tokens`.
            tokens: any shape and integer dtype.
            is_counted: bool, the shape of `tokens`. None: all tokens are counted.
        """
        flat = (slots.to(torch.int64) * self._counts.shape[1] + tokens).reshape(-1)
        # Made on the device: a copy from the host would wait for all work under way.
        times = torch.ones_like(flat, dtype=torch.int32) if is_counted is None else is_counted.to(torch.int32).view(-1)
        self._counts.view(-1).scatter_add_(0, flat, times)

    def count_accepted(self, slots: torch.Tensor, accepted: Acceptance) -> None:
        """Count the tokens that a cycle committed, with the bonus tokens.

        Args:
            slots: [bs]. Rows of `req_to_token`.
            accepted: of the same requests.
        """
        offsets = torch.arange(accepted.out_tokens.shape[1], device=self._device)
        is_committed = offsets < accepted.accept_lens[:, None]
        self.count(slots[:, None], accepted.out_tokens, is_committed)

    def apply(
        self,
        logits: torch.Tensor,
        block_tokens: torch.Tensor,
        reqs: list[Req],
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Apply penalties to the target's logits of blocks, in place. Each token sees the tokens before it.

        Args:
            logits: [bs * W, V] float32.
            block_tokens: [bs, W] int64. The bonus token, which has been counted, and the draft tokens.
            slots: [bs]. Rows of `req_to_token`.
            seq_lens: [bs]. Committed tokens with KV. The bonus token has none.
        """
        parameters = _Parameters.of(reqs, self._device)
        prompt_lens = self._tensor([len(req.origin_input_ids) for req in reqs])
        blocks = logits.view(*block_tokens.shape, logits.shape[1])
        parameters.suppress_stop_tokens(blocks, seq_lens + 1 - prompt_lens)
        ops.apply_penalties(
            logits=logits,
            block_tokens=block_tokens,
            counts=self._counts,
            slots=slots,
            frequency=parameters.frequency,
            presence=parameters.presence,
            repetition=parameters.repetition,
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return async_h2d(values, dtype=torch.int64, device=self._device)


@dataclass(frozen=True)
class _Parameters:
    """Penalty parameters of the requests of one batch.

    Attributes:
        frequency: [bs] float32.
        presence: [bs] float32.
        repetition: [bs] float32.
        min_new_tokens: [bs] int64.
        stop_token_ids: [bs, n] int64. Stop tokens of each request, repeated to equal length.
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new_tokens: torch.Tensor
    stop_token_ids: torch.Tensor

    @classmethod
    def of(cls, reqs: list[Req], device: torch.device) -> _Parameters:
        params = [req.sampling_params for req in reqs]
        penalties = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
        stops = [_stop_token_ids(req) if req.sampling_params.min_new_tokens else [] for req in reqs]
        longest = max(map(len, stops))
        # A request without stop tokens has `min_new_tokens` 0 below, so that any token may be its padding.
        padded = [(ids or [0]) + [(ids or [0])[0]] * (longest - max(len(ids), 1)) for ids in stops]
        min_new_tokens = [p.min_new_tokens if ids else 0 for p, ids in zip(params, stops, strict=True)]
        return cls(
            *async_h2d(penalties, dtype=torch.float32, device=device).T.contiguous().unbind(),
            async_h2d(min_new_tokens, dtype=torch.int64, device=device),
            async_h2d(padded, dtype=torch.int64, device=device),
        )

    def suppress_stop_tokens(self, logits: torch.Tensor, generated: torch.Tensor) -> None:
        """Set the logits of stop tokens to -inf, in place, where they would come before `min_new_tokens`.

        Args:
            logits: [bs, n, V]. For n consecutive tokens.
            generated: [bs]. Tokens generated before the first of them.
        """
        bs, num_tokens, _ = logits.shape
        ids = self.stop_token_ids[:, None].expand(bs, num_tokens, -1)
        offsets = torch.arange(num_tokens, device=logits.device)
        too_early = (generated[:, None] + offsets < self.min_new_tokens[:, None])[..., None]
        logits.scatter_(2, ids, logits.gather(2, ids).masked_fill(too_early, -torch.inf))


def _stop_token_ids(req: Req) -> list[int]:
    """Return the tokens that SGLang's `BatchedMinNewTokensPenalizer` suppresses."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
    ids |= req.eos_token_ids or set()
    if req.tokenizer.eos_token_id is not None:
        ids.add(req.tokenizer.eos_token_id)
    return sorted(ids)
