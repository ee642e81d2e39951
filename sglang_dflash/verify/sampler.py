"""Requests that need SGLang's sampler: the target's token after each token of their blocks.

The cycle chooses tokens for every request of a batch (`DecodeCycle.run`). For requests that are not on the fast path
(`fast_path.py`), its choice is replaced here. The logits of their blocks, and of no others, go through everything that
SGLang applies before it chooses, in SGLang's order, and then through SGLang's own sampler. What depends on the tokens
before a token also sees the tokens of the block. The draft is a point mass, so that comparing it with the sampled
tokens is exact rejection sampling (see `reference.accept_prefix`).

Shapes: bs requests of a batch, n of them that are sampled together, W tokens of a block, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.common import async_h2d

from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.types import DrawParameters
from sglang_dflash.verify import failures as row_failures
from sglang_dflash.verify import fast_path, prefill_draws
from sglang_dflash.verify.failures import Failures
from sglang_dflash.verify.output import CycleOutput
from sglang_dflash.verify.penalties import Penalties, are_penalised, is_penalised
from sglang_dflash.verify.prefill_draws import PrefillDraws
from sglang_dflash.verify.request_keys import RequestKeys

# Log probabilities that the sampler returns in lists with an entry for each token of the batch.
_LOGPROB_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)
# SGLang's sampler gets float32 logits of this many bytes at a time, in whole requests and at least one. A GPU takes
# about as long for them as the host does to launch it.
SAMPLER_BYTES = 64 << 20
# Entry of a token whose request asked for no log probabilities.
_NOTHING = torch.empty(0)
# Tensors of a `SamplingBatchInfo` that the sampler reads, with a row for each request. None where no request needs it.
_REQUEST_ROWS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


@dataclass(frozen=True)
class FallbackResult:
    """Decisions of SGLang's sampler in one cycle.

    Attributes:
        parts: each [n] int64 on the device. Batch indices of the requests that were sampled together, ascending. Their
            drafter context has to be appended again (`DecodeCycle.append_fallback`).
        failures: for `GenerationBatchResult.extra_keep_alive_refs`. None if SGLang's sampler chose no token.
    """

    parts: tuple[torch.Tensor, ...] = ()
    failures: list[Failures] | None = None


@dataclass(frozen=True)
class _Part:
    """Requests of a batch that are sampled together.

    Attributes:
        indices: n batch indices, ascending.
        index: [n] int64. The same on the device.
        reqs: the n requests.
    """

    indices: list[int]
    index: torch.Tensor
    reqs: list[Req]

    @classmethod
    def of(cls, batch: ScheduleBatch, indices: list[int]) -> _Part:
        index = async_h2d(indices, dtype=torch.int64, device=batch.device)
        return cls(indices, index, [batch.reqs[i] for i in indices])


@dataclass(frozen=True)
class _Blocks:
    """Inputs and outputs of SGLang's sampler in one cycle.

    Attributes:
        output: of the target's forward. `next_token_logits` is [bs * rows, V], each request's block first. Receives the
            log probabilities.
        tokens: [bs, W] int64. Bonus token and draft tokens.
        positions: [bs, W] int64.
        grammar_tree: the blocks on their way to the CPU. None without grammars.
        failed: [bs, W] bool. Set for tokens after which no token could be chosen.
        errors: by batch index, the first token at which a custom logit processor failed, and its message.
    """

    output: LogitsProcessorOutput
    tokens: torch.Tensor
    positions: torch.Tensor
    grammar_tree: GrammarTree | None
    failed: torch.Tensor
    errors: dict[int, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, output: CycleOutput) -> _Blocks:
        tokens = output.block_tokens
        return cls(
            output.target_output,
            tokens,
            output.positions,
            output.grammar_tree,
            torch.zeros_like(tokens, dtype=torch.bool),
        )


class FallbackCycle(Protocol):
    """Part of the decode cycle that the sampler calls."""

    def accept_fallback(self, output: CycleOutput, index: torch.Tensor, target_tokens: torch.Tensor) -> None:
        """Accept what agrees with the sampler's tokens, in place of what the cycle has accepted.

        Args:
            output: of the cycle. Its `accepted` is changed.
            index: [n] int64, indices of these requests in the batch.
            target_tokens: [n, W] int64, the sampler's token after every token of their blocks.
        """


class FallbackSampler:
    """Chooses tokens for the requests that need SGLang's sampler.

    The worker calls, in this order:

    * prefill: :meth:`prepare_prefill`, the target's forward, :meth:`begin_requests`;
    * decode: :meth:`needs_fallback` and :meth:`draw_parameters`, the cycle, :meth:`resolve`.

    The only state between two calls are the penalties' counts of the running requests.
    """

    def __init__(
        self, target_runner: ModelRunner, num_slots: int, tp_group: GroupCoordinator, keys: RequestKeys
    ) -> None:
        """
        Args:
            num_slots: rows of `req_to_token`, or more.
            keys: of the running requests' noise.
        """
        self.num_slots = num_slots
        self._sampler = target_runner.sampler
        self._tp_group, self._keys = tp_group, keys
        self._has_plain_rules = fast_path.draws_by_plain_rules(self._sampler)
        self._checks = row_failures.watch(self._sampler)
        self._penalties = None
        # A server that only prefills draws first tokens, which have no output before them.
        if runs_cycles():
            self._penalties = Penalties(num_slots, target_runner.model_config.vocab_size, target_runner.device)

    @property
    def penalty_bytes(self) -> int:
        return 0 if self._penalties is None else self._penalties.nbytes

    def prepare_prefill(self, batch: ScheduleBatch) -> None:
        """Set the batch's penalties and noise for the token that the prefill draws, before the target's forward."""
        info = batch.sampling_info
        # Greedy requests have no noise.
        if self._can_draw(info) and not info.is_all_greedy:
            keys = self._keys.begin(batch)
            is_drawn = [req.sampling_params.top_k > 1 and fast_path.is_fast(req, info, True) for req in batch.reqs]
            if any(is_drawn):
                is_drawn = async_h2d(is_drawn, dtype=torch.bool, device=keys.device)
                prefill_draws.prepare(self._sampler, PrefillDraws(keys, is_drawn))
        if self._penalties is not None and are_penalised(info):
            self._penalties.prepare_prefill(batch)

    def begin_requests(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> list[Failures] | None:
        """Begin the decode state of requests with their first token.

        A prompt that is prefilled in chunks begins again with every chunk.

        Args:
            next_token_ids: [bs]. Overwritten by the first rank's tokens where tensor-parallel ranks may differ.

        Returns:
            `FallbackResult.failures` of those tokens.
        """
        # A chunk inside a prompt draws no token.
        prefill_draws.take(self._sampler)
        self._agree(batch.sampling_info, next_token_ids)
        if self._penalties is not None and are_penalised(batch.sampling_info):
            self._penalties.begin(batch, next_token_ids)
        failed, errors = self._checks.take()
        if failed is None:
            return None
        return self._failures(batch, failed[:, None], {i: (0, error) for i, error in errors.items()}, None)

    def begin_transferred(self, batch: ScheduleBatch) -> None:
        """Begin the decode state of requests that another server has prefilled."""
        if self._can_draw(batch.sampling_info):
            self._keys.begin(batch)
        # SGLang computes the batch's penalties before its first cycle.
        if any(is_penalised(req.sampling_params) for req in batch.reqs):
            self._penalties.begin_transferred(batch)

    def needs_fallback(self, batch: ScheduleBatch) -> list[int]:
        """Return the batch indices of the requests that are not on the fast path, ascending."""
        info = batch.sampling_info
        draws = self._can_draw(info)
        # Most batches are decided without a look at their requests.
        if fast_path.is_fast_batch(batch, draws):
            return []
        return [i for i, req in enumerate(batch.reqs) if not fast_path.is_fast(req, info, draws)]

    def draw_parameters(self, info: SamplingBatchInfo) -> DrawParameters | None:
        """Return the parameters of the cycle's own draws; None if it draws for no request.

        The cycle draws for requests that need the fallback too. :meth:`resolve` replaces their tokens.
        """
        return fast_path.draw_parameters(info) if self._can_draw(info) else None

    def _can_draw(self, info: SamplingBatchInfo) -> bool:
        return self._has_plain_rules and info.sampling_seed is None

    def resolve(
        self,
        batch: ScheduleBatch,
        fallback: list[int],
        output: CycleOutput,
        cycle: FallbackCycle,
        grammar_barrier: Callable[[], None] | None,
    ) -> FallbackResult:
        """Choose the tokens of requests that need SGLang's sampler, and replace what the cycle accepted for them.

        Afterwards `output.accepted` is final for all requests. The log probabilities are in `output.target_output`.

        Args:
            fallback: batch indices (:meth:`needs_fallback`), ascending.
            output: of the cycle that has run.
            cycle: accepts the tokens.
            grammar_barrier: overlap scheduling. Advances the grammars to the blocks' first tokens. Called at most once.
        """
        if batch.return_logprob:
            shape = output.block_tokens.shape
            output.target_output.next_token_logprobs = torch.zeros(shape, device=output.block_tokens.device)
        if not fallback:
            return FallbackResult()
        blocks = _Blocks.of(output)
        parts = [_Part.of(batch, indices) for indices in _split(fallback, batch, blocks.tokens.shape[1])]
        for part in parts:
            cycle.accept_fallback(output, part.index, self._sample(batch, part, blocks, grammar_barrier))
            # The first part has waited for the grammars.
            grammar_barrier = None
        if are_penalised(batch.sampling_info):
            self._penalties.count_accepted(batch.req_pool_indices, output.accepted)
        failures = self._failures(batch, blocks.failed, blocks.errors, output.accepted.accept_lens)
        return FallbackResult(tuple(part.index for part in parts), failures)

    def _sample(
        self, batch: ScheduleBatch, part: _Part, blocks: _Blocks, grammar_barrier: Callable[[], None] | None
    ) -> torch.Tensor:
        """Choose a token after every token of a part's blocks, and record log probabilities and failures in `blocks`.

        Returns:
            [n, W] int64.
        """
        reqs, index = part.reqs, part.index
        info = _of_requests(batch.sampling_info, part)
        bs, width = blocks.tokens.shape
        block_tokens = blocks.tokens[index]
        block_logits = blocks.output.next_token_logits.unflatten(0, (bs, -1))[index, :width].to(torch.float32)
        logits = block_logits.view(len(reqs) * width, -1)
        if any(is_penalised(req.sampling_params) for req in reqs):
            self._penalties.apply(logits, block_tokens, reqs, batch.req_pool_indices[index], batch.seq_lens[index])
        if blocks.grammar_tree is not None:
            tree = GrammarTree.from_host(*(tensor[part.indices] for tensor in blocks.grammar_tree.resolve()))
            mask = build_grammar_vocab_mask(
                reqs=reqs, tree=tree, sampling_info=info, device=logits.device, barrier=grammar_barrier
            )
            if mask is not None:
                mask.apply(logits)
        if info.logit_bias is not None:
            block_logits.add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            for i, error in _apply_custom_logit_processors(block_logits, block_tokens, reqs, info).items():
                blocks.errors[part.indices[i]] = error

        # Of two equal logits, SGLang's filters keep either one. An argmax keeps the first.
        is_mixed = info.is_any_greedy and not info.is_all_greedy
        argmax = logits.argmax(dim=-1) if is_mixed else None
        chosen = LogitsProcessorOutput(next_token_logits=logits)
        tokens = self._sampler(
            chosen,
            _of_tokens(info, width),
            any(req.return_logprob for req in reqs),
            _repeat([req.logprob.top_logprobs_num if req.return_logprob else 0 for req in reqs], width),
            _repeat([req.logprob.token_ids_logprob if req.return_logprob else None for req in reqs], width),
            blocks.positions[index].view(-1),
        ).to(torch.int64)
        blocks.failed[index] = self._checks.take()[0].view(-1, width)
        if is_mixed:
            tokens = torch.where((info.top_ks <= 1).repeat_interleave(width), argmax, tokens)
        self._agree(info, tokens)
        if chosen.next_token_logprobs is not None:
            _put_logprobs(blocks.output, chosen, part, bs, width)
        return tokens.view(len(reqs), width)

    def _failures(
        self,
        batch: ScheduleBatch,
        failed: torch.Tensor,
        errors: dict[int, tuple[int, str]],
        accept_lens: torch.Tensor | None,
    ) -> list[Failures]:
        """Start the way of failed rows to the CPU; see :meth:`Failures.of`."""
        if batch.sampling_info.has_custom_logit_processor and self._tp_group.world_size > 1:
            # A processor may do something else on another rank.
            failed = self._tp_group.broadcast(failed.to(torch.int32), src=0).to(torch.bool)
        return [Failures.of(failed, accept_lens, errors)]

    def _agree(self, info: SamplingBatchInfo, tokens: torch.Tensor) -> None:
        """Overwrite tokens by those of the first tensor-parallel rank, where ranks may differ.

        Ranks draw from generators of their own, and a custom logit processor may do something else on another rank. A
        rank that accepts another length waits forever in its next collective.
        """
        may_differ = not info.is_all_greedy or info.has_custom_logit_processor
        if may_differ and self._tp_group.world_size > 1:
            self._tp_group.broadcast(tokens, src=0)


def sampler_bytes(vocab_size: int, width: int) -> int:
    """Return the bytes of one request's logits, as the sampler gets them."""
    return width * vocab_size * torch.float32.itemsize


def _split(indices: list[int], batch: ScheduleBatch, width: int) -> list[list[int]]:
    """Split requests into parts whose logits take at most `SAMPLER_BYTES`, at least one request each."""
    size = max(1, SAMPLER_BYTES // sampler_bytes(batch.sampling_info.vocab_size, width))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _of_requests(info: SamplingBatchInfo, part: _Part) -> SamplingBatchInfo:
    """Return the sampling info of a part, without what only other requests of the batch ask for.

    Penalties are left out. They depend on the tokens before each token: see :class:`Penalties`.
    """
    params = [req.sampling_params for req in part.reqs]
    has_bias = info.logit_bias is not None and any(each.logit_bias is not None for each in params)
    info = replace(
        info,
        **_map_rows(info, lambda rows: rows[part.index]),
        is_all_greedy=all(each.top_k <= 1 for each in params),
        is_any_greedy=any(each.top_k <= 1 for each in params),
        need_top_p_sampling=any(each.top_p != 1.0 for each in params),
        need_top_k_sampling=any(each.top_k != TOP_K_ALL for each in params),
        need_min_p_sampling=any(each.min_p > 0 for each in params),
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=info.logit_bias[part.index] if has_bias else None,
    )
    if info.has_custom_logit_processor:
        info._filter_batch_custom_logit_processor(part.indices)
    return info


def _of_tokens(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Return the sampling info of the n * W tokens of n blocks.

    What changes logits is left out: it has been applied.
    """
    return replace(
        info,
        **_map_rows(info, lambda rows: rows.repeat_interleave(width, dim=0)),
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )


def _map_rows(
    info: SamplingBatchInfo, function: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Apply a function to the tensors of `_REQUEST_ROWS`, and return the results by name."""
    tensors = {name: getattr(info, name) for name in _REQUEST_ROWS}
    return {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}


def _repeat(values: list, times: int) -> list:
    return [value for value in values for _ in range(times)]


def _put_logprobs(
    output: LogitsProcessorOutput, chosen: LogitsProcessorOutput, part: _Part, bs: int, width: int
) -> None:
    """Write the log probabilities of a part where the scheduler reads them: in [bs, W], and in lists of bs * W."""
    output.next_token_logprobs[part.index] = chosen.next_token_logprobs.view(-1, width)
    for name in _LOGPROB_LISTS:
        found = getattr(chosen, name)
        if found is None:
            continue
        if getattr(output, name) is None:
            setattr(output, name, [_NOTHING] * (bs * width))
        entries = getattr(output, name)
        for i, batch_index in enumerate(part.indices):
            entries[batch_index * width : (batch_index + 1) * width] = found[i * width : (i + 1) * width]


def _apply_custom_logit_processors(
    block_logits: torch.Tensor, block_tokens: torch.Tensor, reqs: list[Req], info: SamplingBatchInfo
) -> dict[int, tuple[int, str]]:
    """Apply custom logit processors token by token.

    Processors may read the output so far from the request, so the draft tokens are appended to it one after the other.

    Args:
        block_logits: [n, W, V] float32, changed in place.
        block_tokens: [n, W] int64.

    Returns:
        by request, the first token at which its processor fails, and the message.
    """
    errors = {}
    drafts = [
        (req, tokens[1:])
        for req, tokens in zip(reqs, block_tokens.tolist(), strict=True)
        if req.custom_logit_processor is not None
    ]
    output_lens = [len(req.output_ids) for req, _ in drafts]
    try:
        for j in range(block_logits.shape[1]):
            for req, tokens in drafts:
                req.output_ids.extend(tokens[j - 1 : j])
            for i, error in row_failures.apply_processors(block_logits[:, j], info).items():
                errors.setdefault(i, (j, error))
    finally:
        for (req, _), output_len in zip(drafts, output_lens, strict=True):
            del req.output_ids[output_len:]
    return errors


def needs_the_last_result(result: bool, scheduler, batch: ScheduleBatch | None, last_batch) -> bool:
    """AFTER `Scheduler.is_disable_overlap_for_batch`: wait for the last result where the host needs it.

    Custom logit processors read the output so far. Grammars are advanced while a block is verified. In a mixed batch a
    decoding request has no block: its one token is drawn at once, so that its grammar must be advanced before.
    """
    if result or batch is None or batch.spec_algorithm.is_none() or not scheduler.result_queue:
        return result
    mode, has_processor = batch.forward_mode, batch.sampling_info.has_custom_logit_processor
    return (mode.is_decode() and has_processor) or (mode.is_mixed() and (has_processor or batch.has_grammar))


def sample_by_row(
    original,
    sampler: Sampler,
    probs: torch.Tensor,
    sampling_info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> tuple[torch.Tensor, object]:
    """AROUND `Sampler._sample_from_probs`: make a request's tokens independent of its batch.

    A prefill draws by the noise of its requests. Elsewhere SGLang draws seeded tokens in the order of the vocabulary if
    no request of the batch has a filter, else in the order of probability. Here each row decides for itself.

    Args:
        probs: [T, V].

    Returns:
        [T] tokens, and what SGLang captures of them.
    """
    tokens, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    draws = prefill_draws.take(sampler)
    if draws is not None:
        return draws.draw(tokens, probs, sampling_info, positions), capture
    if not row_failures.is_watched(sampler) or sampling_info.sampling_seed is None or simple_sampling_case:
        return tokens, capture
    is_unfiltered = (sampling_info.top_ks == TOP_K_ALL) & (sampling_info.top_ps == 1.0)
    unfiltered, _ = original(sampler, probs, sampling_info, positions, True)
    return torch.where(is_unfiltered, unfiltered, tokens), capture
