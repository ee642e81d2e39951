"""Test plugin: run every replayed cycle again without graphs, and record how much the two differ.

`support.plugins` installs it. Running a forward again writes the same KV to the same slots. Only the drafter's context
must be appended once more.
"""

import json
import os
from dataclasses import replace

import torch

RECORDS = os.environ.get("GRAPH_CHECK_RECORDS")


def record(stage, forward_batch, graph_bs, replayed, eager, hidden_error):
    entry = {
        "stage": stage,
        "bs": forward_batch.batch_size,
        "graph_bs": graph_bs,
        "tokens": replayed.numel(),
        "different_tokens": int((replayed != eager).sum()),
        "hidden_error": hidden_error,
    }
    with open(RECORDS, "a") as f:
        f.write(json.dumps(entry) + "\n")


def register():
    if RECORDS is None:
        return
    from sglang_dflash.engine.executor import EagerExecutor
    from sglang_dflash.engine.worker import DFlashWorker

    verify, init_cuda_graphs = DFlashWorker._verify, DFlashWorker.init_cuda_graphs
    own_attention = {}

    def remember_attention(worker):
        # Graphs may verify with another backend.
        own_attention[worker] = worker.target_worker.model_runner.attn_backend
        init_cuda_graphs(worker)

    def run_twice(worker, forward_batch, can_run_cuda_graph=False):
        begun = forward_batch.input_ids.clone()
        output = verify(worker, forward_batch, can_run_cuda_graph)
        if not can_run_cuda_graph:
            return output
        runner, cycle = worker.target_worker.model_runner, worker._built.cycle
        graphs = runner.decode_cuda_graph_runner
        replay, drafted = graphs.output(forward_batch, output, has_grammar=False), forward_batch.input_ids.clone()
        accepted = replay.accepted

        block = graphs.inputs(forward_batch.batch_size).block
        backend = worker.draft_model_runner.attn_backend
        eagerly = EagerExecutor(backend, False, worker._verify)
        # The drafts are in the memory of the block's tokens.
        drafts = cycle._draft(forward_batch, replace(block, input_ids=begun), eagerly)
        drafted_again = drafts.block_tokens.view(-1)
        record("draft", forward_batch, graphs.bs, drafted, drafted_again, None)

        same_block = replace(forward_batch, input_ids=drafted)
        of_graphs = runner.attn_backend
        runner.decode_cuda_graph_runner, runner.attn_backend = None, own_attention[worker]
        try:
            eager = verify(worker, same_block)
        finally:
            runner.decode_cuda_graph_runner, runner.attn_backend = graphs, of_graphs
        target_tokens = cycle._choose(eager, block, in_shards=False)
        accepted_again = cycle.verification.accept(same_block, block, drafts, eager, target_tokens).accepted
        replayed_hidden, eager_hidden = (out.hidden_states.float() for out in (output, eager))
        hidden_error = float((replayed_hidden - eager_hidden).norm() / eager_hidden.norm())
        record("verify", forward_batch, graphs.bs, accepted.out_tokens, accepted_again.out_tokens, hidden_error)

        cycle.append_fallback(replay, torch.arange(len(accepted.accept_lens), device=worker.device))
        torch.cuda.synchronize()
        return output

    DFlashWorker._verify, DFlashWorker.init_cuda_graphs = run_twice, remember_attention
