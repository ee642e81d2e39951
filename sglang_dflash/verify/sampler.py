"""The target's token after each token of a block, as SGLang would have chosen it one token at a time.

Where all that a request asks for is the argmax of the untouched logits, or a draw from their softmax and its filters,
the cycle chooses by itself (`DecodeCycle.run`), inside its CUDA graph. It does so for the other requests of a
batch too, for which it is overruled here: the logits of their blocks, and of no others, go through everything that
SGLang applies before it chooses, in SGLang's order, and then through SGLang's own sampler. What depends on the tokens
before a token sees those of the block too. The draft is a point mass, so comparing it with the sampled tokens is exact
rejection sampling (see `reference.accept_prefix`).
Shapes: bs requests, of which n at a time are overruled; W tokens of each block, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.common import async_h2d

from sglang_dflash.requests import failing
from sglang_dflash.requests.failing import Failures
from sglang_dflash.types import DrawParameters
from sglang_dflash.verify.acceptance import Acceptance
from sglang_dflash.verify.penalties import Penalties, are_penalised, is_penalised

# What the sampler finds besides the log probability of each token: a list with an entry for each token of the batch.
_LOGPROB_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)
# SGLang's sampler gets float32 logits of this many bytes at a time, in whole requests and at least one. A GPU takes
# about as long for them as the host does to launch it.
SAMPLER_BYTES = 64 << 20
# The entry of a token whose request has asked for nothing.
_NOTHING = torch.empty(0)
# Tensors of a `SamplingBatchInfo` that the sampler reads, with a row for each request; None where nobody needs one.
_REQUEST_ROWS = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def draw_parameters(info: SamplingBatchInfo) -> DrawParameters | None:
    """Of the requests that the cycle draws for; None: all are greedy."""
    if info.is_all_greedy:
        return None
    return DrawParameters(info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps)


@dataclass(frozen=True)
class Part:
    """Some requests of a batch, whose logits go through SGLang's sampler together.

    Attributes:
        places: of them in the batch, ascending.
        index: [n] int64, the same on the device.
        reqs: themselves.
    """

    places: list[int]
    index: torch.Tensor
    reqs: list[Req]

    @classmethod
    def of(cls, batch: ScheduleBatch, places: list[int]) -> Part:
        index = async_h2d(places, dtype=torch.int64, device=batch.device)
        return cls(places, index, [batch.reqs[place] for place in places])


class BlockSampler:
    """Chooses the target's tokens of blocks, for requests that the cycle cannot choose for."""

    def __init__(self, target_runner: ModelRunner, num_slots: int, tp_group: GroupCoordinator) -> None:
        """
        Args:
            num_slots: of running requests: rows of `req_to_token`, or more.
        """
        self.num_slots = num_slots
        self._sampler = target_runner.sampler
        self._tp_group = tp_group
        # Whether SGLang draws unseeded tokens by the rules of `reference.sample_rows.allowed_distribution`.
        self._has_plain_rules = (
            type(self._sampler) is Sampler
            and get_exec().kernel.sampling_backend == "flashinfer"
            and self._sampler.rl_on_policy_target is None
        )
        self._checks = failing.watch(self._sampler)
        self._penalties = Penalties(num_slots, target_runner.model_config.vocab_size, target_runner.device)

    def overruled(self, batch: ScheduleBatch) -> list[int]:
        """Places in a batch of the requests that `DecodeCycle.run` cannot choose for."""
        info = batch.sampling_info
        draws = self._draws_plainly(info)
        # Of most batches this needs no look at their requests.
        if _is_plain_batch(batch, draws):
            return []
        return [place for place, req in enumerate(batch.reqs) if not _is_plain(req, info, draws)]

    def draw_parameters(self, info: SamplingBatchInfo) -> DrawParameters | None:
        """Of the cycle's own draws; None: it draws for no request. What it draws for those that are overruled does no
        harm."""
        return draw_parameters(info) if self._draws_plainly(info) else None

    def _draws_plainly(self, info: SamplingBatchInfo) -> bool:
        return self._has_plain_rules and info.sampling_seed is None

    @property
    def penalty_bytes(self) -> int:
        """Of the counts that penalties depend on."""
        return self._penalties.nbytes

    def begin_prefill(self, batch: ScheduleBatch) -> None:
        if are_penalised(batch.sampling_info):
            self._penalties.begin(batch)

    def end_prefill(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Take note of the first token, [bs], of each request; of one whose prompt goes on, `begin_prefill` forgets."""
        self._agree(batch.sampling_info, next_token_ids)
        if are_penalised(batch.sampling_info):
            self._penalties.count(batch.req_pool_indices, next_token_ids)

    def failures(self, batch: ScheduleBatch, accept_lens: torch.Tensor | None = None) -> list[Failures] | None:
        """Of the tokens that SGLang's sampler has just chosen, for `GenerationBatchResult.extra_keep_alive_refs`; None
        where it chose none.

        Args:
            accept_lens: [bs], of the blocks that were verified; None after a prefill.
        """
        if accept_lens is not None:
            failed, errors = self._failed, self._errors
        else:
            failed, errors = self._checks.take()
            if failed is None:
                return None
            failed, errors = failed[:, None], {i: (0, error) for i, error in errors.items()}
        if batch.sampling_info.has_custom_logit_processor and self._tp_group.world_size > 1:
            # Nobody knows what a processor does on another rank.
            failed = self._tp_group.broadcast(failed.to(torch.int32), src=0).to(torch.bool)
        return [Failures.of(failed, accept_lens, errors)]

    def end_cycle(self, batch: ScheduleBatch, accepted: Acceptance) -> None:
        """Take note of what a cycle committed."""
        if are_penalised(batch.sampling_info):
            self._penalties.count_accepted(batch.req_pool_indices, accepted)

    def parts(self, batch: ScheduleBatch, places: list[int], width: int) -> list[Part]:
        """Requests of a batch, so many at a time that their logits take `SAMPLER_BYTES` at most."""
        # Of these blocks, [bs, W], and by place: see :class:`sglang_dflash.requests.failing.Failures`.
        self._failed = torch.zeros((len(batch.reqs), width), dtype=torch.bool, device=batch.device)
        self._errors: dict[int, tuple[int, str]] = {}
        size = max(1, SAMPLER_BYTES // sampler_bytes(batch.sampling_info.vocab_size, width))
        return [Part.of(batch, places[start : start + size]) for start in range(0, len(places), size)]

    def __call__(
        self,
        batch: ScheduleBatch,
        part: Part,
        output: LogitsProcessorOutput,
        block_tokens: torch.Tensor,
        positions: torch.Tensor,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> torch.Tensor:
        """Choose a token after every token of some blocks.

        Args:
            output: of the target's forward, with `next_token_logits` [bs * rows, V], of each request those of its
                block first; takes the log probabilities.
            block_tokens: [bs, W] int64.
            positions: [bs, W] int64.
            grammar_tree: the blocks on their way to the CPU, where the batch has grammars.
            grammar_barrier: overlap scheduling; brings the grammars up to the blocks' first tokens, unless they are.

        Returns:
            [n, W] int64.
        """
        reqs, index = part.reqs, part.index
        info = _of_requests(batch.sampling_info, part)
        bs, width = block_tokens.shape
        block_tokens = block_tokens[index]
        blocks = output.next_token_logits.unflatten(0, (bs, -1))[index, :width].to(torch.float32)
        logits = blocks.view(len(reqs) * width, -1)
        if any(is_penalised(req.sampling_params) for req in reqs):
            self._penalties.apply(logits, block_tokens, reqs, batch.req_pool_indices[index], batch.seq_lens[index])
        if grammar_tree is not None:
            tree = GrammarTree.from_host(*(tensor[part.places] for tensor in grammar_tree.resolve()))
            mask = build_grammar_vocab_mask(
                reqs=reqs, tree=tree, sampling_info=info, device=logits.device, barrier=grammar_barrier
            )
            if mask is not None:
                mask.apply(logits)
        if info.logit_bias is not None:
            blocks.add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            for i, error in _apply_custom_logit_processors(blocks, block_tokens, reqs, info).items():
                self._errors[part.places[i]] = error

        # Of two equal logits, SGLang's filters keep either; an argmax keeps the first.
        is_mixed = info.is_any_greedy and not info.is_all_greedy
        argmax = logits.argmax(dim=-1) if is_mixed else None
        chosen = LogitsProcessorOutput(next_token_logits=logits)
        tokens = self._sampler(
            chosen,
            _of_tokens(info, width),
            any(req.return_logprob for req in reqs),
            _repeat([req.logprob.top_logprobs_num if req.return_logprob else 0 for req in reqs], width),
            _repeat([req.logprob.token_ids_logprob if req.return_logprob else None for req in reqs], width),
            positions[index].view(-1),
        ).to(torch.int64)
        self._failed[index] = self._checks.take()[0].view(-1, width)
        if is_mixed:
            tokens = torch.where((info.top_ks <= 1).repeat_interleave(width), argmax, tokens)
        self._agree(info, tokens)
        if chosen.next_token_logprobs is not None:
            _take_logprobs(output, chosen, part, bs, width)
        return tokens.view(len(reqs), width)

    def _agree(self, info: SamplingBatchInfo, tokens: torch.Tensor) -> None:
        """Make tokens those of the first tensor-parallel rank, in place, where ranks may differ: they draw from
        generators of their own, and nobody knows what a custom logit processor does on another one. A rank that accepts
        another length waits forever in its next collective."""
        is_of_rank = not info.is_all_greedy or info.has_custom_logit_processor
        if is_of_rank and self._tp_group.world_size > 1:
            self._tp_group.broadcast(tokens, src=0)


def sampler_bytes(vocab_size: int, width: int) -> int:
    """Of one request's logits, as the sampler gets them."""
    return width * vocab_size * torch.float32.itemsize


def _is_plain_batch(batch: ScheduleBatch, draws: bool) -> bool:
    """Whether the cycle chooses for every request of a batch, by what SGLang knows of them together. Where one asks for
    one thing and one for another, this may be false although :func:`_is_plain` is true of each."""
    info = batch.sampling_info
    if batch.has_grammar or batch.return_logprob or info.has_custom_logit_processor:
        return False
    if are_penalised(info) or info.logit_bias is not None:
        return False
    has_all_filters = info.need_min_p_sampling and info.need_top_k_sampling and info.need_top_p_sampling
    return info.is_all_greedy or (draws and not has_all_filters)


def _is_plain(req: Req, info: SamplingBatchInfo, draws: bool) -> bool:
    """Whether the cycle chooses for a request of a batch: by its untouched logits, where it asks for tokens alone.

    Args:
        draws: whether it draws as the batch's sampler would, for requests without all three filters.
    """
    params = req.sampling_params
    has_processor = info.has_custom_logit_processor and req.custom_logit_processor is not None
    if req.grammar is not None or req.return_logprob or has_processor:
        return False
    if is_penalised(params) or params.logit_bias is not None:
        return False
    # With all three, SGLang applies one after the other, top_p to what top_k has left.
    has_all_filters = params.min_p > 0 and params.top_k != TOP_K_ALL and params.top_p != 1.0
    return params.top_k <= 1 or (draws and not has_all_filters)


def _of_requests(info: SamplingBatchInfo, part: Part) -> SamplingBatchInfo:
    """Of the n requests of a part: what they ask for, and nothing that only others of their batch do. Penalties are
    left out, which depend on the tokens before each: see :class:`Penalties`."""
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
        info._filter_batch_custom_logit_processor(part.places)
    return info


def _of_tokens(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Of the n * W tokens of n blocks: how each is drawn. What changes logits is left out, as it has been applied."""
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
    """The tensors of `_REQUEST_ROWS`, by name, with other rows."""
    tensors = {name: getattr(info, name) for name in _REQUEST_ROWS}
    return {name: None if tensor is None else function(tensor) for name, tensor in tensors.items()}


def _repeat(values: list, times: int) -> list:
    return [value for value in values for _ in range(times)]


def _take_logprobs(
    output: LogitsProcessorOutput, chosen: LogitsProcessorOutput, part: Part, bs: int, width: int
) -> None:
    """Put log probabilities of some requests where the scheduler looks for them: in [bs, W], and in lists of bs * W."""
    output.next_token_logprobs[part.index] = chosen.next_token_logprobs.view(-1, width)
    for name in _LOGPROB_LISTS:
        found = getattr(chosen, name)
        if found is None:
            continue
        if getattr(output, name) is None:
            setattr(output, name, [_NOTHING] * (bs * width))
        entries = getattr(output, name)
        for i, place in enumerate(part.places):
            entries[place * width : (place + 1) * width] = found[i * width : (i + 1) * width]


def _apply_custom_logit_processors(
    blocks: torch.Tensor, block_tokens: torch.Tensor, reqs: list[Req], info: SamplingBatchInfo
) -> dict[int, tuple[int, str]]:
    """Token by token, as processors may look at the output so far, which they find in the request.

    Args:
        blocks: [n, W, V] float32, their logits, changed in place.
        block_tokens: [n, W] int64.

    Returns:
        by request, the first token at which its processor fails, and how.
    """
    errors = {}
    drafts = [
        (req, tokens[1:])
        for req, tokens in zip(reqs, block_tokens.tolist(), strict=True)
        if req.custom_logit_processor is not None
    ]
    output_lens = [len(req.output_ids) for req, _ in drafts]
    try:
        for j in range(blocks.shape[1]):
            for req, tokens in drafts:
                req.output_ids.extend(tokens[j - 1 : j])
            for i, error in failing.apply_processors(blocks[:, j], info).items():
                errors.setdefault(i, (j, error))
    finally:
        for (req, _), output_len in zip(drafts, output_lens, strict=True):
            del req.output_ids[output_len:]
    return errors


def needs_the_last_result(result: bool, scheduler, batch: ScheduleBatch | None, last_batch) -> bool:
    """AFTER `Scheduler.is_disable_overlap_for_batch`.

    Custom logit processors read the output so far. Grammars are brought up to it while a block is verified, but not for
    a request that decodes in a batch of prefills, where its one token is drawn at once.
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
    """AROUND `Sampler._sample_from_probs`: [T, V] probabilities in, [T] tokens and what is captured of them out.

    SGLang draws seeded tokens in the order of the vocabulary where no request of a batch has a filter, else in the
    order of probability. Deciding that for each row keeps a request's tokens the same in every batch.
    """
    tokens, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    if not failing.is_watched(sampler) or sampling_info.sampling_seed is None or simple_sampling_case:
        return tokens, capture
    is_unfiltered = (sampling_info.top_ks == TOP_K_ALL) & (sampling_info.top_ps == 1.0)
    unfiltered, _ = original(sampler, probs, sampling_info, positions, True)
    return torch.where(is_unfiltered, unfiltered, tokens), capture
