"""Test plugin: a decode cycle in which the host waits for the GPU ends the server; other cycles are recorded.

`support.plugins` installs it. `SYNC_CHECK_RECORDS` names a file for the records; cycles are checked while it exists.
Only the worker's step is checked, because the scheduler has to wait for results.
"""

import functools
import itertools
import json
import os

import torch

RECORDS = os.environ.get("SYNC_CHECK_RECORDS")
# Cycles that may still initialise something.
WARM_UP = 8


def is_noticed(tensor: torch.Tensor) -> bool:
    """Return whether a wait would raise an error here."""
    try:
        tensor.sum().item()
    except RuntimeError:
        return True
    return False


def raise_on_waits(mode: str) -> None:
    # Nothing waits for a CPU.
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def register():
    if RECORDS is None:
        return
    from sglang_dflash.engine.worker import DFlashWorker

    step = DFlashWorker.forward_batch_generation
    cycles = itertools.count()

    @functools.wraps(step)
    def checked(worker, batch, *args, **kwargs):
        if not os.path.exists(RECORDS) or not batch.forward_mode.is_decode() or next(cycles) < WARM_UP:
            return step(worker, batch, *args, **kwargs)
        bs = batch.batch_size()
        raise_on_waits("error")
        try:
            entry = {"bs": bs, "waits_are_noticed": is_noticed(batch.seq_lens)}
            entry["plain"] = not worker._loaded.sampler.needs_fallback(batch)
            result = step(worker, batch, *args, **kwargs)
        finally:
            raise_on_waits("default")
        entry["replayed"] = result.can_run_cuda_graph
        with open(RECORDS, "a") as f:
            f.write(json.dumps(entry) + "\n")
        return result

    DFlashWorker.forward_batch_generation = checked
