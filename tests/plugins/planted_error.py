"""Plugin for the tests: decode cycles with an error, which the fuzzer and the tests must find.

`support.plugins` installs it. `PLANTED_ERROR` says which error:
    token       the first token of each cycle is another
    logprob     log probabilities are wrong
    page        each cycle leaks a page of KV slots
    sibling     nodes of trees see the sibling before them
    key         nodes of trees see the node after them, which is one key too many
"""

from __future__ import annotations

import functools
import os

ERROR = os.environ.get("PLANTED_ERROR")


def widen_trees() -> None:
    """Have nodes see one node more."""
    import torch

    from sglang_dflash import ops

    grow_trees = ops.grow_trees

    @functools.wraps(grow_trees)
    def widened(*args):
        grow_trees(*args)
        parents, ancestors = args[-1].parents, args[-1].ancestors
        nodes = torch.arange(parents.shape[1], device=parents.device)
        if ERROR == "sibling":
            is_sibling = (parents[:, :, None] == parents[:, None, :]) & (parents[:, :, None] >= 0)
            seen = (is_sibling & (nodes < nodes[:, None])).long().mul(nodes).amax(dim=2)
            has_one = (is_sibling & (nodes < nodes[:, None])).any(dim=2)
        else:
            seen = (nodes + 1).clamp(max=len(nodes) - 1).expand_as(parents)
            has_one = torch.ones_like(seen, dtype=torch.bool)
        ancestors |= torch.where(has_one, torch.ones_like(seen) << seen, 0)

    ops.grow_trees = widened


def register() -> None:
    if ERROR is None:
        return
    if ERROR in ("sibling", "key"):
        widen_trees()
        return
    from sglang_dflash.engine.worker import DFlashWorker

    step = DFlashWorker.forward_batch_generation

    @functools.wraps(step)
    def planted(worker, batch, *args, **kwargs):
        is_decode = batch.forward_mode.is_decode()
        result = step(worker, batch, *args, **kwargs)
        if is_decode and ERROR == "token":
            # The text goes on as if it had been the right one.
            result.next_token_ids[0] ^= 1
        elif is_decode and ERROR == "logprob" and batch.return_logprob:
            result.logits_output.next_token_logprobs += 0.01
        elif is_decode and ERROR == "page":
            batch.token_to_kv_pool_allocator.alloc(batch.token_to_kv_pool_allocator.page_size)
        return result

    DFlashWorker.forward_batch_generation = planted
