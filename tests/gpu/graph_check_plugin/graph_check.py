"""A plugin for the tests: runs every drafter and target forward twice, replayed and eager, and writes down both.

It is found through its `.dist-info` folder where `PYTHONPATH` names this directory. Running a forward again is
harmless: it writes the same KV to the same slots.
"""

import contextlib
import json
import os

import torch

RECORDS = os.environ.get("GRAPH_CHECK_RECORDS")


@contextlib.contextmanager
def without_graphs(runner):
    graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = graphs


def record(stage, runner, bs, replayed, eager):
    """Append how far the two are apart: wrong tokens, and the relative error of the hidden states."""
    hidden = [out.hidden_states.float() for _, out in (replayed, eager)]
    entry = {
        "stage": stage,
        "bs": bs,
        "graph_bs": runner.decode_cuda_graph_runner.bs,
        "tokens": replayed[0].numel(),
        "different_tokens": int((replayed[0] != eager[0]).sum()),
        "hidden_error": float((hidden[0] - hidden[1]).norm() / hidden[1].norm()),
    }
    with open(RECORDS, "a") as f:
        f.write(json.dumps(entry) + "\n")


def keep_output(runner, outputs):
    """Make a model runner leave a copy of its last hidden states in `outputs`."""
    forward = runner.forward

    def wrapped(*args, **kwargs):
        out = forward(*args, **kwargs)
        logits = out.logits_output
        outputs.append((out.can_run_graph, type(logits)(None, hidden_states=logits.hidden_states.clone())))
        return out

    runner.forward = wrapped


def register():
    if RECORDS is None:
        return
    from sglang_dflash.worker import DFlashWorker

    original = {"draft": DFlashWorker._draft, "verify": DFlashWorker._verify}

    def twice(stage, runner_of):
        def run(worker, batch, *args):
            runner = runner_of(worker)
            outputs = []
            # Only the instance is wrapped, and only while this method runs.
            keep_output(runner, outputs)
            try:
                result = original[stage](worker, batch, *args)
                if outputs[-1][0]:
                    bs = batch.batch_size()
                    first = (tokens_of(stage, result).clone(), outputs[-1][1])
                    with without_graphs(runner):
                        again = original[stage](worker, batch, *args)
                    assert not outputs[-1][0]
                    torch.cuda.synchronize()
                    record(stage, runner, bs, first, (tokens_of(stage, again), outputs[-1][1]))
            finally:
                del runner.forward
            return result

        return run

    DFlashWorker._draft = twice("draft", lambda worker: worker.draft_model_runner)
    DFlashWorker._verify = twice("verify", lambda worker: worker.target_worker.model_runner)


def tokens_of(stage, result):
    return result if stage == "draft" else result[0].out_tokens
