"""Division of the keys of a batch of trees into chunks of about one size, in torch."""

from __future__ import annotations

import torch


def divide_keys(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    window: int | None,
    num_nodes: int,
    unit: int,
    min_chunk: int,
    chunks: torch.Tensor,
    part_indptr: torch.Tensor,
) -> None:
    """Divide each request's keys, with those of its nodes, into equal chunks of the smallest size that fits `chunks`.

    Args:
        seq_lens: [bs] int64, the context of each request.
        req_pool_indices: [bs] int64, its row of `req_to_token`.
        window: keys of the context that a request still needs; None: all.
        num_nodes: N.
        unit: keys of which every chunk but a request's last has a multiple.
        min_chunk: fewest keys of a chunk, up to rounding to the nearest number of chunks.
        chunks: [P, 6] int32, written; P is at least bs. See :class:`sglang_dflash.types.KeyChunks`.
        part_indptr: [bs + 1] int32, written.
    """
    contexts = seq_lens.tolist()
    firsts = [0 if window is None else max(0, context - window) for context in contexts]
    num_keys = [context + num_nodes - first for context, first in zip(contexts, firsts, strict=True)]

    def counts(size: int) -> list[int]:
        return [max(1, (n + size // 2) // size) for n in num_keys]

    low, high = min_chunk, max(min_chunk, *num_keys)
    while low < high:
        middle = (low + high) // 2
        if sum(counts(middle)) > len(chunks):
            low = middle + 1
        else:
            high = middle

    rows, parts = [], [0]
    for request, count in enumerate(counts(low)):
        size = -(-num_keys[request] // (count * unit)) * unit
        end = contexts[request] + num_nodes
        begins = range(firsts[request], end, size)
        for i, begin in enumerate(begins):
            part = -1 if len(begins) == 1 else parts[-1] + i
            pool_row = int(req_pool_indices[request])
            rows.append((request, begin, min(begin + size, end), part, contexts[request], pool_row))
        parts.append(parts[-1] + (0 if len(begins) == 1 else len(begins)))
    chunks.fill_(-1)
    chunks[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    part_indptr.copy_(torch.tensor(parts, dtype=torch.int32))
