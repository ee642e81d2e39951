"""Test plugin: run every replayed cycle again without graphs, and record how much the two differ.

`support.plugins` installs it. `GRAPH_CHECK_RECORDS` names a file for the records; cycles are checked while it exists.
The second run begins with the state of before the replay. Afterwards everything is as the replay left it.
"""

import json
import os
from dataclasses import replace

import torch

RECORDS = os.environ.get("GRAPH_CHECK_RECORDS")


def record(stage, forward_batch, graph_bs, replayed, eager, hidden_error=None, state_error=None):
    """Write a record; `replayed` and `eager` are numbers that should be equal, of any number of requests."""
    entry = {
        "stage": stage,
        "bs": forward_batch.batch_size,
        "graph_bs": graph_bs,
        "tokens": replayed.numel(),
        "different_tokens": int((replayed != eager).sum()),
        "hidden_error": hidden_error,
        "state_error": state_error,
    }
    with open(RECORDS, "a") as f:
        f.write(json.dumps(entry) + "\n")


def saved(tensors):
    """Return a function that gives tensors the values that they have now."""
    copies = [tensor.clone() for tensor in tensors]

    def restore():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    return restore


def buffers_of(pool):
    """Return all tensors of a target's KV pool."""
    # Recurrent and sliding layers have pools of their own.
    parts = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
    return [buffer for part in parts for buffer in (*part.k_buffer, *part.v_buffer)]


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
        if not can_run_cuda_graph or not os.path.exists(RECORDS):
            return verify(worker, forward_batch, can_run_cuda_graph)
        runner, cycle, bigrams = worker.target_worker.model_runner, worker._built.cycle, worker._loaded.bigrams
        graphs, bs = runner.decode_cuda_graph_runner, forward_batch.batch_size
        # As `_run_cycle` got it from `graphs.inputs`.
        block = graphs._inputs[bs].block
        # What a cycle reads and changes, besides the slots of its own tokens.
        texts = worker._built.texts
        changed = [bigrams.tables] if texts is None else [bigrams.tables, texts.tokens]
        states = cycle._states
        if states is not None:
            changed += [states._states.conv, states._states.temporal]
        begin_again, begun = saved(changed), block.input_ids.clone()

        output = verify(worker, forward_batch, can_run_cuda_graph)
        replay = graphs.output(forward_batch, output, has_grammar=False)
        replayed_trees = graphs._graphs[graphs.bs, graphs._is_greedy].batch.spec_info.trees
        parents = None if replayed_trees is None else replayed_trees.parents[:bs].clone()
        rows = (forward_batch.input_ids, forward_batch.positions, forward_batch.out_cache_loc)
        tokens, positions, _ = (tensor.clone() for tensor in rows)
        keep_results = saved([*changed, *buffers_of(runner.token_to_kv_pool), *rows])
        advanced = [tensor.clone() for tensor in changed]

        begin_again()
        backend = worker.draft_model_runner.attn_backend
        eagerly = EagerExecutor(backend, False, worker._verify)
        drafts = cycle._draft(forward_batch, replace(block, input_ids=begun), eagerly)
        if drafts.trees is None:
            # The chain that was verified is verified again.
            nodes, again = tokens, drafts.block_tokens.view(-1)
            is_same = torch.ones(bs, dtype=torch.bool, device=tokens.device)
        else:
            # Nodes in any order. The new trees are verified, and the results of trees that are the same are compared.
            nodes, again = (
                ((place << 32) + node).view(bs, -1).sort(dim=1).values
                for place, node in ((positions, tokens), (forward_batch.positions, forward_batch.input_ids))
            )
            is_same = torch.stack([tokens == forward_batch.input_ids, positions == forward_batch.positions])
            # The same tokens may be below other nodes.
            is_same = torch.cat([is_same.view(2, bs, -1), (parents == drafts.trees.parents)[None]])
            is_same = is_same.all(dim=2).all(dim=0)
        record("draft", forward_batch, graphs.bs, nodes, again)

        if drafts.trees is None:
            forward_batch.input_ids.copy_(tokens)
        same_batch = replace(forward_batch)
        of_graphs = runner.attn_backend
        runner.decode_cuda_graph_runner, runner.attn_backend = None, own_attention[worker]
        try:
            with cycle.verification.attending_eagerly():
                eager = verify(worker, same_batch)
        finally:
            runner.decode_cuda_graph_runner, runner.attn_backend = graphs, of_graphs
        target_tokens = cycle._choose(same_batch, eager, block, is_greedy=False)
        verified = cycle.verification.accept(same_batch, block, drafts, eager, target_tokens)
        if states is not None:
            states.commit(
                same_batch.req_pool_indices,
                same_batch.seq_lens,
                verified.accepted.accept_lens,
                verified.paths,
                block.advances_states,
            )
        hidden_error, state_errors = None, []
        if is_same.any():
            hidden_error = distance(*of_same(is_same, output.hidden_states, eager.hidden_states))
        # A tie of two tokens changes how many are accepted, and the state follows them.
        accepted_alike = torch.equal(replay.accepted.accept_lens, verified.accepted.accept_lens)
        if states is not None and is_same.all() and accepted_alike:
            state_errors = [
                distance(tensor, copy) for tensor, copy in zip(changed, advanced) if copy.is_floating_point()
            ]
        accepted = of_same(is_same, replay.accepted.out_tokens, verified.accepted.out_tokens)
        record("verify", forward_batch, graphs.bs, *accepted, hidden_error, max(state_errors, default=None))

        keep_results()
        # The second run has drafted into the context.
        features, _ = cycle.split_hidden_states(replay.verified.hidden_states)
        slots = cycle.verification.context_slots(forward_batch, block, cycle.draft_runner)
        cycle._context.write(features, block.positions, slots, replay.accepted.accept_lens)
        torch.get_device_module(worker.device).synchronize()
        return output

    def of_same(is_same, *tensors):
        return [tensor.unflatten(0, (len(is_same), -1))[is_same] for tensor in tensors]

    def distance(mine, expected):
        return float((mine.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-20))

    DFlashWorker._verify, DFlashWorker.init_cuda_graphs = run_twice, remember_attention
