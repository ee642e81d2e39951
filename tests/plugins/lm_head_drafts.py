"""Test plugin: the drafter's hidden states are rows of the lm_head, so that it drafts known texts.

`support.plugins` installs it. The row of a token has the largest logit of that token by far, in any row-normalised
lm_head. So drafts are the known text if the lm_head's product, or a shortlist of it, finds the largest logits of the
present weights. `LM_HEAD_DRAFTS` names a JSON file: a list of `{"input_ids", "output_ids"}`.
"""

import json
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

DRAFTS = os.environ.get("LM_HEAD_DRAFTS")


def register():
    if DRAFTS is None:
        return
    from sglang.srt.distributed import get_tp_group

    from sglang_dflash.engine.cycle import DecodeCycle
    from sglang_dflash.engine.graphs import CycleGraphRunner
    from sglang_dflash.engine.worker import DFlashWorker
    from sglang_dflash.vocab.shard import vocab_parts

    texts = {tuple(r["input_ids"]): r["input_ids"] + r["output_ids"] for r in json.loads(Path(DRAFTS).read_text())}
    tables = {}
    alloc_memory_pool, prefill, forward_draft, load_batch = (
        DFlashWorker.alloc_memory_pool,
        DFlashWorker._prefill,
        DecodeCycle._forward_draft,
        CycleGraphRunner.load_batch,
    )

    def allocate(worker, *args, **kwargs):
        alloc_memory_pool(worker, *args, **kwargs)
        tables["tokens"] = torch.zeros_like(worker.req_to_token_pool.req_to_token, dtype=torch.int64)

    def begin(worker, batch, on_publish):
        for req in batch.reqs:
            text = texts.get(tuple(req.origin_input_ids))
            if text is not None:
                table = tables["tokens"]
                table[req.kv.req_pool_idx, : len(text)] = torch.tensor(text, device=table.device)
        return prefill(worker, batch, on_publish)

    def draft(cycle, batch, block, executor):
        hidden_states = forward_draft(cycle, batch, block, executor)
        table, lm_head = tables["tokens"], cycle._head._lm_head
        bs = batch.batch_size
        positions = block.positions.view(bs, -1).clamp(max=table.shape[1] - 1)
        tokens = table[block.req_pool_indices[:, None], positions].flatten()
        # This rank's rows are in one part.
        [(first, num_columns, first_token)] = vocab_parts(lm_head)
        rows = tokens - first_token
        is_here = (rows >= 0) & (rows < num_columns)
        found = lm_head.weight[first + rows.clamp(0, num_columns - 1)] * is_here[:, None]
        return get_tp_group().all_reduce(found).to(hidden_states.dtype)

    def load(runner, *args, **kwargs):
        load_batch(runner, *args, **kwargs)
        logger.warning("Loads a graph: %s", runner._replay_graph_key.variant_label)

    DFlashWorker.alloc_memory_pool, DFlashWorker._prefill, DecodeCycle._forward_draft = allocate, begin, draft
    CycleGraphRunner.load_batch = load
