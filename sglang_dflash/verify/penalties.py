"""What a request's own output changes about its next token: penalties, and stop tokens before `min_new_tokens`.

SGLang counts output tokens when the scheduler has seen them, which under overlap scheduling is a step too late, and
knows one count per request where a block needs one per token. Here they are counted on the device, as they are decided.
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
from sglang_dflash.verify.acceptance import Acceptance


def are_penalised(info: SamplingBatchInfo) -> bool:
    """Whether any request of a batch has a penalty or `min_new_tokens`, while SGLang runs the batch."""
    return info.acc_additive_penalties is not None


def is_penalised(params: SamplingParams) -> bool:
    """Whether a request has any of them."""
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > 0
    )


class Penalties:
    """The penalties of every running request, and the counts that they depend on."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        # [request slots, V], from the start, so that SGLang finds the memory taken when it sizes its pools.
        self._counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def begin(self, batch: ScheduleBatch) -> None:
        """Before a prefill, which draws a token of each request: count what they generated before a retraction.

        Requests that decode in a mixed batch, its last ones, have been counted already, and further than the scheduler
        has seen. Where needed, the penalties of `batch.sampling_info` are made those of the whole output.
        """
        num_decoding = len(batch.decoding_reqs or [])
        num_prefills = len(batch.reqs) - num_decoding
        slots, reqs = batch.req_pool_indices, batch.reqs[:num_prefills]
        self._counts[slots[:num_prefills]] = 0
        tokens = [token for req in reqs for token in req.output_ids]
        if not tokens and not num_decoding:
            return
        of_request = [i for i, req in enumerate(reqs) for _ in req.output_ids]
        self.count(slots[self._tensor(of_request)], self._tensor(tokens))
        parameters = _Parameters.of(batch.reqs, self._device)
        # SGLang's own begin at zero again.
        info = batch.sampling_info
        info.acc_additive_penalties, info.acc_scaling_penalties = penalties_of(
            self._counts[slots], parameters.frequency, parameters.presence, parameters.repetition
        )
        prompt_lens = self._tensor([len(req.origin_input_ids) for req in batch.reqs])
        # What a request generated has been prefilled again, or is the last token of it.
        generated = (batch.seq_lens - prompt_lens).clamp(min=0)
        parameters.suppress_stop_tokens(info.acc_additive_penalties[:, None], generated)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor, is_counted: torch.Tensor | None = None) -> None:
        """Count tokens in the rows of their requests.

        Args:
            slots: of the requests in `req_to_token`, of any shape that broadcasts to that of `tokens`.
            tokens: of any integer type.
            is_counted: bool, like `tokens`; None: all are.
        """
        flat = (slots.to(torch.int64) * self._counts.shape[1] + tokens).reshape(-1)
        # Made on the device: a number brought there would have the host wait for all that is under way.
        times = torch.ones_like(flat, dtype=torch.int32) if is_counted is None else is_counted.to(torch.int32).view(-1)
        self._counts.view(-1).scatter_add_(0, flat, times)

    def count_accepted(self, slots: torch.Tensor, accepted: Acceptance) -> None:
        """Count what a cycle committed, the bonus tokens included."""
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
        """Adjust the target's logits of blocks in place, those of each token by the tokens before it.

        Args:
            logits: [bs * W, V] float32.
            block_tokens: [bs, W] int64, the bonus token, which is counted already, and the draft tokens.
            slots: [bs], of the requests in `req_to_token`.
            seq_lens: [bs], committed tokens with KV; the bonus token has none.
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
    """Of the requests of one batch.

    Attributes:
        frequency, presence, repetition: [bs] float32.
        min_new_tokens: [bs] int64.
        stop_token_ids: [bs, n] int64, a request's stop tokens, repeated to equal length.
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
        # Any token serves a request without stop tokens: it has none to suppress.
        padded = [(ids or [0]) + [(ids or [0])[0]] * (longest - max(len(ids), 1)) for ids in stops]
        min_new_tokens = [p.min_new_tokens if ids else 0 for p, ids in zip(params, stops, strict=True)]
        return cls(
            *async_h2d(penalties, dtype=torch.float32, device=device).T.contiguous().unbind(),
            async_h2d(min_new_tokens, dtype=torch.int64, device=device),
            async_h2d(padded, dtype=torch.int64, device=device),
        )

    def suppress_stop_tokens(self, logits: torch.Tensor, generated: torch.Tensor) -> None:
        """Rule out stop tokens, in place, where they would come before `min_new_tokens`.

        Args:
            logits: [bs, n, V], of n tokens that follow each other.
            generated: [bs], tokens generated before the first of them.
        """
        bs, num_tokens, _ = logits.shape
        ids = self.stop_token_ids[:, None].expand(bs, num_tokens, -1)
        offsets = torch.arange(num_tokens, device=logits.device)
        too_early = (generated[:, None] + offsets < self.min_new_tokens[:, None])[..., None]
        logits.scatter_(2, ids, logits.gather(2, ids).masked_fill(too_early, -torch.inf))


def _stop_token_ids(req: Req) -> list[int]:
    """What SGLang's `BatchedMinNewTokensPenalizer` suppresses."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
    ids |= req.eos_token_ids or set()
    if req.tokenizer.eos_token_id is not None:
        ids.add(req.tokenizer.eos_token_id)
    return sorted(ids)
