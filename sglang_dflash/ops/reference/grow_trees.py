"""Trees of drafts from one drafter forward, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import Trees


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """Make trees of the most probable paths.

    A drafter's rows are independent of each other, so a path is as probable as the product of its tokens'
    probabilities, and any candidate of a depth may follow any of the depth before. The N - 1 most probable paths are
    found best first: each that is taken brings two that are no more probable than it, the one that ends in the next
    candidate of its depth instead, and the one that goes on with the first candidate of the next depth. A path is taken
    after all its beginnings. Source: DDTree (arXiv 2604.12989).

    Log probabilities are summed in float32 from the root on. Of equally probable paths the one is taken that goes on
    from the earliest node.

    Args:
        bonus_tokens: [P] int64.
        candidates: [P, depths, K] int64, the tokens that may be at depth 1, 2, ..., the most probable first.
        logits: [P, depths, K] float32, theirs.
        log_sums: [P, depths] float32, what makes log probabilities of them when it is subtracted.
        is_chain: [P] int64, 1 for requests whose drafts are the first candidates in a row, one a depth.
        seq_lens: [P] int64, committed tokens that have KV; the root's position.
        req_pool_indices: [P] int64.
        req_to_token: [rows, width] int32.
        trees: written, of N nodes each.
    """
    num_requests, num_nodes = trees.parents.shape
    if num_requests == 0:
        return
    depths, k = candidates.shape[1:]
    log_probs = (logits - log_sums[:, :, None]).tolist()
    tokens, positions = trees.tokens.view(-1, num_nodes), trees.positions.view(-1, num_nodes)
    trees.parents.fill_(-1)
    for request in range(num_requests):
        depth_of, ancestors_of = [0], [1]
        tokens[request] = bonus_tokens[request]
        of_depth = [[float(torch.tensor(x, dtype=torch.float32)) for x in row] for row in log_probs[request]]
        # Of every path that may be taken: how probable it is without its last token, that token's depth and rank, and
        # the node before it.
        paths = [(0.0, 1, 0, 0)] if depths else []
        while paths and len(depth_of) < num_nodes:
            sums = [_sum(base, of_depth[depth - 1][rank]) for base, depth, rank, _ in paths]
            taken = sums.index(max(sums))
            base, depth, rank, parent = paths[taken]
            node = len(depth_of)
            tokens[request, node] = candidates[request, depth - 1, rank]
            trees.parents[request, node] = parent
            depth_of.append(depth)
            ancestors_of.append(ancestors_of[parent] | 1 << node)
            is_alone = bool(is_chain[request])
            paths[taken : taken + 1] = [(base, depth, rank + 1, parent)] if rank + 1 < k and not is_alone else []
            if depth < depths:
                paths.append((sums[taken], depth + 1, 0, node))
        # The others are no nodes.
        for node in range(len(depth_of), num_nodes):
            depth_of.append(0)
            ancestors_of.append(1 << node)
        signed = [bits - (1 << 64) if bits >> 63 else bits for bits in ancestors_of]
        trees.ancestors[request] = torch.tensor(signed, device=seq_lens.device)
        positions[request] = seq_lens[request] + torch.tensor(depth_of, device=seq_lens.device)
    places = seq_lens[:, None] + torch.arange(num_nodes, device=seq_lens.device)
    trees.out_cache_loc.view(-1, num_nodes).copy_(req_to_token[req_pool_indices[:, None], places])


def _sum(base: float, log_prob: float) -> float:
    """In float32."""
    return float(torch.tensor(base, dtype=torch.float32) + torch.tensor(log_prob, dtype=torch.float32))
