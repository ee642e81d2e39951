"""Batch-1 greedy DFlash decoding over an HF target in plain torch: the oracle of the tests.

Letters in shapes: T prompt tokens, L tokens of a forward, W block width, N nodes of a tree, V vocabulary,
H hidden size, F = len(target_layer_ids) * H.
"""

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from support.oracle.drafter import LayerKV, ReferenceDrafter
from support.oracle.tree import (
    CANDIDATES,
    Drafts,
    Text,
    Tree,
    accept_path,
    chain_margin,
    follow_chain,
    grow_tree,
    margin,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class DFlashOutput:
    """Output of one request.

    Attributes:
        tokens: generated tokens, cut at `max_new_tokens` and after the first stop token, which is kept.
        accept_lengths: per cycle, committed tokens with the bonus, 1..W, before the cut. The first token comes from the
            prefill and belongs to no cycle.
        margin: smallest margin of the cycles; see `support.oracle.tree.margin` and `chain_margin`.
    """

    tokens: list[int]
    accept_lengths: list[int]
    margin: float = math.inf


@torch.inference_mode()
def dflash_generate(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    block_size: int | None = None,
    draft_window: int | None = None,
    page_size: int = 1,
    stop_token_ids: Collection[int] = (),
    num_nodes: int | None = None,
    num_candidates: int = CANDIDATES,
) -> DFlashOutput:
    """Generate greedily with DFlash. The tokens are the target's own, in fewer target forwards.

    Args:
        target: a causal LM.
        drafter: for this target.
        input_ids: [T] or [1, T] int64, T >= 1.
        max_new_tokens: most tokens to generate.
        block_size: W; None for the drafter's.
        draft_window: number of last context tokens that the drafter sees; None for all.
        page_size: the window's start is rounded down to a multiple of this.
        stop_token_ids: tokens that end the request.
        num_nodes: N of the trees to verify; None to verify chains.
        num_candidates: candidates of each position. A drafter with pairs has its own number, of which at most this many
            follow the same node of a tree.
    """
    block_size = block_size or drafter.config.block_size
    if num_nodes is not None:
        # No path is longer than the number of nodes.
        block_size = min(block_size, num_nodes)
    input_ids = torch.as_tensor(input_ids, device=target.device).flatten()
    target_cache = new_cache(target)

    # Prefill: the target reads the prompt and gives the first bonus token.
    target_tokens, features = target_forward(target, drafter, input_ids, target_cache)
    context_kv = append_context(drafter, [], features)
    tokens = [int(target_tokens[-1])]
    accept_lengths, least_margin = [], math.inf

    while not is_finished(tokens, max_new_tokens, stop_token_ids):
        # Draft. The bonus token is the last committed one; neither model has its KV yet.
        seen_from = 0 if draft_window is None else window_start(context_length(context_kv), draft_window, page_size)
        hidden = draft_block(target, drafter, context_kv, bonus=tokens[-1], block_size=block_size, seen_from=seen_from)
        draft_logits = drafter.draft_logits(hidden, target.get_output_embeddings())
        drafts = drafts_of(drafter, draft_logits, hidden, Text(input_ids.tolist() + tokens), num_candidates)

        # Verify. Accept the drafts that the target agrees with, then the bonus: the target's token after the last
        # match. Accepted drafts equal the target's tokens, so both are read from the target's output.
        if num_nodes is None:
            draft_tokens = follow_chain(drafts)
            accepted, target_tokens, features = verify_chain(target, drafter, tokens[-1], draft_tokens, target_cache)
            least_margin = min(least_margin, chain_margin(drafts, draft_tokens, target_tokens))
        else:
            # Only trees copy.
            log_probs, token_ids = of_all_tokens(drafts.log_probs, drafts.token_ids, target)
            drafts = replace(drafts, log_probs=log_probs, token_ids=token_ids, has_copies=True)
            tree = grow_tree(drafts, num_nodes)
            path, target_tokens, features = verify_tree(target, drafter, tokens[-1], tree, target_cache)
            accepted = target_tokens[path].tolist()
            least_margin = min(least_margin, margin(tree, path, target_tokens, drafts))
        tokens += accepted
        accept_lengths.append(len(accepted))

        # Append context: the old bonus and the accepted drafts. Neither model may ever see the other tokens again.
        context_kv = append_context(drafter, context_kv, features)

    return DFlashOutput(cut(tokens, max_new_tokens, stop_token_ids), accept_lengths, least_margin)


@torch.inference_mode()
def greedy_generate(
    target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, *, stop_token_ids: Collection[int] = ()
) -> list[int]:
    """Decode greedily with one target forward per token. `dflash_generate` must give the same tokens."""
    cache = new_cache(target)
    step_ids = torch.as_tensor(input_ids, device=target.device).flatten()
    tokens: list[int] = []
    while not is_finished(tokens, max_new_tokens, stop_token_ids):
        logits = target(input_ids=step_ids[None], past_key_values=cache, use_cache=True).logits
        step_ids = logits[0, -1:].argmax(-1)
        tokens.append(int(step_ids))
    return tokens


def is_recurrent(target: PreTrainedModel) -> bool:
    """Return whether the target has layers that keep a state instead of keys and values."""
    return "linear_attention" in (target.config.to_dict().get("layer_types") or ())


def new_cache(target: PreTrainedModel) -> DynamicCache:
    """Return an empty cache. Layers with windows also keep all tokens, because the last ones may be cut off."""
    return DynamicCache(config=target.config) if is_recurrent(target) else DynamicCache()


def verify_chain(
    target: PreTrainedModel, drafter: ReferenceDrafter, bonus: int, draft_tokens: Tensor, cache: DynamicCache
) -> tuple[list[int], Tensor, Tensor]:
    """Run [bonus, d_1 .. d_{W-1}] as a causal chain, and accept the longest correct prefix of the drafts.

    Args:
        target, drafter: the models.
        bonus: the bonus token.
        draft_tokens: [W - 1] int64.
        cache: of the target; grows by the bonus and the accepted drafts.

    Returns:
        The committed tokens: the accepted drafts and the next bonus.
        target_tokens: [W] int64. The target's token after each of the chain.
        features: [1, L, F] of the tokens that were added to the cache.
    """
    seq_len, has_states = cache.get_seq_length(), is_recurrent(target)
    block = torch.cat([draft_tokens.new_tensor([bonus]), draft_tokens])
    # Rejected tokens cannot be removed from a state, so the accepted tokens are run again on the original cache.
    tried = copy.deepcopy(cache) if has_states else cache
    target_tokens, features = target_forward(target, drafter, block, tried)
    accept_length = int((draft_tokens == target_tokens[:-1]).cumprod(0).sum()) + 1
    if has_states:
        target_forward(target, drafter, block[:accept_length], cache)
    else:
        cache.crop(seq_len + accept_length)
    return target_tokens[:accept_length].tolist(), target_tokens, features[:, :accept_length]


def verify_tree(
    target: PreTrainedModel, drafter: ReferenceDrafter, bonus: int, tree: Tree, cache: DynamicCache
) -> tuple[list[int], Tensor, Tensor]:
    """Run all nodes, each after the cached tokens and its own path, and accept a path.

    A mask shows each node its own path alone. Recurrent layers have no mask, so with them each path to a leaf is run
    separately, on a copy of the cache.

    Args:
        target, drafter: the models.
        bonus: the bonus token, which is the root.
        tree: the drafts.
        cache: of the target; grows by the accepted nodes.

    Returns:
        path: the accepted nodes, with the root.
        target_tokens: [N] int64. The target's token after each node.
        features: [1, L, F] of the accepted nodes.
    """
    seq_len = cache.get_seq_length()
    nodes = torch.cat([tree.tokens.new_tensor([bonus]), tree.tokens])
    if is_recurrent(target):
        target_tokens = torch.empty_like(nodes)
        for leaf in set(range(len(nodes))) - set(tree.parents[1:]):
            path = [leaf]
            while path[0] != 0:
                path.insert(0, tree.parents[path[0]])
            target_tokens[path], _ = target_forward(target, drafter, nodes[path], copy.deepcopy(cache))
        path = accept_path(tree, target_tokens)
        _, features = target_forward(target, drafter, nodes[path], cache)
        return path, target_tokens, features
    sees = torch.cat([tree.sees().new_ones(len(nodes), seq_len), tree.sees()], dim=1)
    mask = torch.zeros(sees.shape, dtype=target.dtype, device=target.device).masked_fill(~sees, -torch.inf)
    positions = seq_len + torch.tensor(tree.depths, device=target.device)
    target_tokens, features = target_forward(
        target, drafter, nodes, cache, attention_mask=mask[None, None], position_ids=positions[None]
    )
    path = accept_path(tree, target_tokens)
    kept = torch.tensor([*range(seq_len), *(seq_len + node for node in path)], device=target.device)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    return path, target_tokens, features[:, path]


def target_forward(
    target: PreTrainedModel, drafter: ReferenceDrafter, step_ids: Tensor, cache: DynamicCache, **options: Tensor
) -> tuple[Tensor, Tensor]:
    """Run step_ids [L] after the cached tokens, which grow by L.

    Args:
        target, drafter: the models.
        step_ids: [L] int64.
        cache: of the target.
        options: of the target's forward; without any, it runs a causal chain.

    Returns:
        target_tokens: [L] int64. The argmax after every token.
        features: [1, L, F] in the drafter's dtype. Outputs of the target layers that the drafter reads.
    """
    out = target(input_ids=step_ids[None], past_key_values=cache, use_cache=True, output_hidden_states=True, **options)
    return out.logits[0].argmax(-1), context_features(out.hidden_states, drafter)


def context_features(hidden_states: tuple[Tensor, ...], drafter: ReferenceDrafter) -> Tensor:
    """Return features [bs, L, F] in the drafter's dtype for HF hidden states, (layers + 1) x [bs, L, H].

    `hidden_states[0]` is the embedding, so the output of layer i is `hidden_states[i + 1]`. HF applies the final norm
    to the last entry, so the last layer's output cannot be read.
    """
    layer_ids = drafter.config.target_layer_ids
    if max(layer_ids) + 1 >= len(hidden_states) - 1:
        raise ValueError(f"target_layer_ids {layer_ids} must leave out the last of {len(hidden_states) - 1} layers")
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1).to(drafter.fc.weight.dtype)


def append_context(drafter: ReferenceDrafter, context_kv: list[LayerKV], features: Tensor) -> list[LayerKV]:
    """Extend every layer's context KV by features [1, L, F]. An empty list is an empty context."""
    start = context_length(context_kv)
    positions = torch.arange(start, start + features.shape[1], device=features.device)[None]
    new_kv = drafter.project_context(features, positions)
    if not context_kv:
        return new_kv
    return [
        (torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2))
        for (keys, values), (new_keys, new_values) in zip(context_kv, new_kv, strict=True)
    ]


def context_length(context_kv: list[LayerKV]) -> int:
    """Return the number of tokens in the context."""
    return context_kv[0][0].shape[2] if context_kv else 0


def window_start(seq_len: int, draft_window: int, page_size: int) -> int:
    """Return the first position of the last `draft_window` of `seq_len` context tokens, rounded down to a page."""
    return max(0, seq_len - draft_window) // page_size * page_size


def draft_block(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    context_kv: list[LayerKV],
    *,
    bonus: int,
    block_size: int,
    seen_from: int = 0,
) -> Tensor:
    """Run one drafter forward over the rows of `[bonus, mask x (W - 1)]` that it has, right after the context.

    Args:
        target, drafter: the models.
        context_kv: of the drafter.
        bonus: the bonus token.
        block_size: W.
        seen_from: first position of the context that the drafter sees.

    Returns:
        [W - 1, H]. Hidden states that predict the drafts.
    """
    seq_len, is_shifted = context_length(context_kv), drafter.config.sample_from_anchor
    rows = block_size - is_shifted
    block = torch.full((rows,), drafter.config.mask_token_id, device=target.device)
    block[0] = bonus
    block_embeds = target.get_input_embeddings()(block).to(drafter.fc.weight.dtype)
    if drafter.mask_embedding is not None:
        block_embeds[block == drafter.config.mask_token_id] = drafter.mask_embedding
    block_positions = torch.arange(seq_len, seq_len + rows, device=target.device)
    context_positions = torch.arange(seen_from, seq_len, device=target.device)
    seen_kv = [(keys[:, :, seen_from:], values[:, :, seen_from:]) for keys, values in context_kv]
    hidden = drafter(block_embeds[None, None], block_positions[None, None], seen_kv, context_positions[None])
    return hidden[0, 0, 0 if is_shifted else 1 :]


def of_all_tokens(log_probs: Tensor, token_ids: Tensor, target: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return log probabilities and tokens of the target's vocabulary: [W - 1, V] and [V].

    Args:
        log_probs, token_ids: of the drafter's vocabulary. Its other tokens are impossible, but may be copied.
        target: the target.
    """
    every = torch.arange(target.get_input_embeddings().num_embeddings, device=log_probs.device)
    known = torch.full((len(log_probs), len(every)), -math.inf, device=log_probs.device)
    return known.index_copy_(1, token_ids, log_probs), every


def pair_scores(drafter: ReferenceDrafter, hidden: Tensor) -> Callable[[int, int, Tensor], Tensor] | None:
    """Return the scores of tokens [K] at a depth >= 1 after a token, for hidden states [W - 1, H]; None: no pairs."""
    if drafter.pairs is None:
        return None
    return lambda before, depth, tokens: drafter.pairs(torch.tensor(before), hidden[depth - 1], tokens)


def drafts_of(drafter: ReferenceDrafter, logits: Tensor, hidden: Tensor, text: Text, num_candidates: int) -> Drafts:
    """Return the drafts of a block, without copies.

    Args:
        drafter: the model.
        logits: [W - 1, V].
        hidden: [W - 1, H]. What the logits are computed from.
        text: up to the bonus token.
        num_candidates: as for :func:`dflash_generate`.
    """
    pairs = pair_scores(drafter, hidden)
    k = min(num_candidates, logits.shape[-1]) if pairs is None else drafter.pairs.num_candidates
    log_probs = logits.float().log_softmax(-1)
    return Drafts(log_probs, drafter.token_ids, k, text, pairs, num_candidates, has_copies=False)


def is_finished(tokens: list[int], max_new_tokens: int, stop_token_ids: Collection[int]) -> bool:
    """Return whether the request has all its tokens or contains a stop token."""
    return len(tokens) >= max_new_tokens or not set(tokens).isdisjoint(stop_token_ids)


def cut(tokens: list[int], max_new_tokens: int, stop_token_ids: Collection[int]) -> list[int]:
    """Return at most `max_new_tokens` tokens, and none after the first stop token."""
    tokens = tokens[:max_new_tokens]
    stop_at = next((i for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[: stop_at + 1]
