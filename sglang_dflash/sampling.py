"""The target's token after each row of a block, as SGLang would have chosen it one token at a time.

Where all that a batch asks for is the argmax of the untouched logits, or a draw from their softmax and its filters, the
cycle chooses by itself (`DecodeCycle.accept_plain`), inside its CUDA graph. Other batches are chosen for here: a row's
logits go through everything that SGLang applies before it chooses, in SGLang's order, and then through SGLang's own
sampler. What depends on the tokens before a row sees those of the block too. The draft is a point mass, so comparing it
with the sampled tokens is exact rejection sampling (see `reference.accept_prefix`).
Shapes: bs requests, B rows of a block, V tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash.accept import Acceptance
from sglang_dflash.penalties import Penalties, are_penalised
from sglang_dflash.reference.sample_rows import DrawParameters

# Samplers of DFLASH targets: see `sample_by_row`.
_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


def draw_parameters(info: SamplingBatchInfo) -> DrawParameters | None:
    """Of the requests of a plain batch; None: all are greedy."""
    if info.is_all_greedy:
        return None
    return DrawParameters(info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps)


class BlockSampler:
    """Chooses the target's tokens of whole blocks."""

    def __init__(self, target_runner: ModelRunner, tp_group: GroupCoordinator) -> None:
        self._sampler = target_runner.sampler
        self._tp_group = tp_group
        # Whether SGLang draws unseeded tokens by the rules of `reference.sample_rows.allowed_distribution`.
        self._has_plain_rules = (
            type(self._sampler) is Sampler
            and get_exec().kernel.sampling_backend == "flashinfer"
            and self._sampler.rl_on_policy_target is None
        )
        _samplers.add(self._sampler)
        num_slots = target_runner.req_to_token_pool.req_to_token.shape[0]
        self._penalties = Penalties(num_slots, target_runner.model_config.vocab_size, target_runner.device)

    def is_plain(self, batch: ScheduleBatch) -> bool:
        """Whether `DecodeCycle.accept_plain` chooses what every request of a batch asks for."""
        info = batch.sampling_info
        if (
            batch.has_grammar
            or batch.return_logprob
            or are_penalised(info)
            or info.logit_bias is not None
            or info.has_custom_logit_processor
        ):
            return False
        if info.is_all_greedy:
            return True
        # With all three filters in a batch, SGLang applies one after the other, top_p to what top_k has left. A greedy
        # request is one with top_k.
        has_joint_filters = not (info.need_min_p_sampling and info.need_top_k_sampling and info.need_top_p_sampling)
        return (
            self._has_plain_rules
            and has_joint_filters
            and info.sampling_seed is None
            and not any(info.return_sampling_masks or [])
        )

    def begin_prefill(self, batch: ScheduleBatch) -> None:
        if are_penalised(batch.sampling_info):
            self._penalties.begin(batch)

    def end_prefill(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Take note of the first token, [bs], of each request; of one whose prompt goes on, `begin_prefill` forgets."""
        if not batch.sampling_info.is_all_greedy:
            self._agree(next_token_ids)
        if are_penalised(batch.sampling_info):
            self._penalties.count(batch.req_pool_indices, next_token_ids)

    def end_cycle(self, batch: ScheduleBatch, accepted: Acceptance) -> None:
        """Take note of what a cycle committed."""
        if are_penalised(batch.sampling_info):
            self._penalties.count_accepted(batch.req_pool_indices, accepted)

    def __call__(
        self,
        batch: ScheduleBatch,
        output: LogitsProcessorOutput,
        block_tokens: torch.Tensor,
        positions: torch.Tensor,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> torch.Tensor:
        """Choose a token after every row.

        Args:
            output: of the target's forward, with `next_token_logits` [bs * B, V]; takes the log probabilities.
            block_tokens: [bs, B] int64.
            positions: [bs * B] int64.
            grammar_tree: the block on its way to the CPU, where the batch has grammars.
            grammar_barrier: overlap scheduling; brings the grammars up to the block's first row.

        Returns:
            [bs, B] int64.
        """
        info = batch.sampling_info
        bs, block_size = block_tokens.shape
        logits = output.next_token_logits.to(torch.float32).contiguous()
        if are_penalised(info):
            self._penalties.apply(logits, block_tokens, batch.reqs, batch.req_pool_indices, batch.seq_lens)
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=grammar_tree, sampling_info=info, device=logits.device, barrier=grammar_barrier
            )
            mask.apply(logits)
        rows = logits.view(bs, block_size, -1)
        if info.logit_bias is not None:
            rows.add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            _apply_custom_logit_processors(rows, block_tokens, batch)

        # Of two equal logits, SGLang's filters keep either; an argmax keeps the first.
        is_mixed = info.is_any_greedy and not info.is_all_greedy
        argmax = logits.argmax(dim=-1) if is_mixed else None
        chosen = LogitsProcessorOutput(next_token_logits=logits)
        tokens = self._sampler(
            chosen,
            _per_row(info, block_size),
            batch.return_logprob,
            _repeat(batch.top_logprobs_nums, block_size),
            _repeat(batch.token_ids_logprobs, block_size),
            positions,
        ).to(torch.int64)
        if is_mixed:
            tokens = torch.where((info.top_ks <= 1).repeat_interleave(block_size), argmax, tokens)
        if not info.is_all_greedy:
            self._agree(tokens)
        if batch.return_logprob:
            output.next_token_logprobs = chosen.next_token_logprobs.view(bs, block_size)
            output.next_token_top_logprobs_val = chosen.next_token_top_logprobs_val
            output.next_token_top_logprobs_idx = chosen.next_token_top_logprobs_idx
            output.next_token_token_ids_logprobs_val = chosen.next_token_token_ids_logprobs_val
            output.next_token_token_ids_logprobs_idx = chosen.next_token_token_ids_logprobs_idx
        return tokens.view(bs, block_size)

    def _agree(self, tokens: torch.Tensor) -> None:
        """Make sampled tokens those of the first tensor-parallel rank, in place: ranks draw from generators of their
        own, and one that accepts another length waits forever in its next collective."""
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(tokens, src=0)


def _per_row(info: SamplingBatchInfo, block_size: int) -> SamplingBatchInfo:
    """The parameters of each request for each of its rows, without what has been applied to the logits."""

    def repeat(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(block_size, dim=0)

    return replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )


def _repeat(values: list | None, times: int) -> list | None:
    return None if values is None else [value for value in values for _ in range(times)]


def _apply_custom_logit_processors(rows: torch.Tensor, block_tokens: torch.Tensor, batch: ScheduleBatch) -> None:
    """Row by row, as processors may look at the output so far, which they find in the request.

    Args:
        rows: [bs, B, V], changed in place.
    """
    drafts = [
        (req, tokens[1:])
        for req, tokens in zip(batch.reqs, block_tokens.tolist(), strict=True)
        if req.custom_logit_processor is not None
    ]
    output_lens = [len(req.output_ids) for req, _ in drafts]
    try:
        for j in range(rows.shape[1]):
            for req, tokens in drafts:
                req.output_ids.extend(tokens[j - 1 : j])
            apply_custom_logit_processor(rows[:, j], batch.sampling_info)
    finally:
        for (req, _), output_len in zip(drafts, output_lens, strict=True):
            del req.output_ids[output_len:]


def needs_the_last_result(result: bool, scheduler, batch: ScheduleBatch | None, last_batch) -> bool:
    """AFTER `Scheduler.is_disable_overlap_for_batch`.

    Custom logit processors read the output so far. Grammars are brought up to it while a block is verified, but not for
    a request that decodes in a batch of prefills, where its one row is drawn at once.
    """
    if result or batch is None or batch.spec_algorithm.is_none() or not scheduler.result_queue:
        return result
    mode, has_processor = batch.forward_mode, batch.sampling_info.has_custom_logit_processor
    return (mode.is_decode() and has_processor) or (mode.is_mixed() and (has_processor or batch.has_grammar))


def sample_by_row(
    original,
    sampler: Sampler,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> tuple[torch.Tensor, object]:
    """AROUND `Sampler._sample_from_probs`: [T, V] probabilities in, [T] tokens and what is captured of them out.

    SGLang draws seeded tokens in the order of the vocabulary where no request of a batch has a filter, else in the
    order of probability. Deciding that for each row keeps a request's tokens the same in every batch.
    """
    tokens, capture = original(sampler, probs, info, positions, simple_sampling_case)
    if sampler not in _samplers or info.sampling_seed is None or simple_sampling_case:
        return tokens, capture
    is_unfiltered = (info.top_ks == TOP_K_ALL) & (info.top_ps == 1.0)
    unfiltered, _ = original(sampler, probs, info, positions, True)
    return torch.where(is_unfiltered, unfiltered, tokens), capture
