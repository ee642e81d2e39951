"""Random trees of drafts, as `sglang_dflash.types.Trees` describes them."""

import torch


def random_parents(bs: int, num_nodes: int, max_len: int, reach: int = 3) -> torch.Tensor:
    """Return the parent of each node, [bs, N] int64. Some places have no node; their parent is -1 too.

    Args:
        max_len: nodes of a path at most.
        reach: a parent is one of the `reach` places before its child. A small number gives deep trees.
    """
    parents = torch.full((bs, num_nodes), -1)
    depths = torch.zeros(bs, num_nodes, dtype=torch.int64)
    for request in range(bs):
        for node in range(1, num_nodes):
            parent = int(torch.randint(max(0, node - reach), node, ()))
            if depths[request, parent] < max_len - 1 and (parent == 0 or parents[request, parent] >= 0):
                parents[request, node] = parent
                depths[request, node] = depths[request, parent] + 1
    return parents


def chain_parents(bs: int, num_nodes: int) -> torch.Tensor:
    """Return the parents of chains, [bs, N] int64, in one row of memory for all requests."""
    return (torch.arange(num_nodes) - 1).expand(bs, -1)


def paths_to_nodes(parents: torch.Tensor) -> list[list[int]]:
    """Return for each node of one tree the nodes from the root to it; parents: [N] int64."""
    paths = []
    for node, parent in enumerate(parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """Return `Trees.ancestors`, [bs, N] int64; parents: [bs, N] int64."""
    # Bit 63 is the sign.
    bits = [1 << node if node < 63 else -(1 << 63) for node in range(parents.shape[1])]
    return torch.tensor([[sum(bits[i] for i in path) for path in paths_to_nodes(row)] for row in parents])
