"""Test plugin: the cycles of a batch size take every draft length in turn, and each cycle is recorded.

`support.plugins` installs it. `WIDTH_CHECK_RECORDS` names a file for the records, which are written while it exists.
"""

import functools
import itertools
import json
import math
import os
from collections import defaultdict

RECORDS = os.environ.get("WIDTH_CHECK_RECORDS")


def register():
    if RECORDS is None:
        return
    from sglang_dflash.engine.adaptive import graph_sizes
    from sglang_dflash.engine.adaptive.controller import LengthChooser
    from sglang_dflash.engine.worker import DFlashWorker
    from sglang_dflash.ops import add_norm, small_m_linear

    # The tiny pair never keeps a GPU computing.
    graph_sizes.MIN_GAIN, graph_sizes.MAX_LOSS = 0, math.inf
    # And its weights are smaller than those for which the kernels for few rows and for norms are there.
    small_m_linear.faster_rows = lambda weight, is_gated: small_m_linear.MAX_ROWS
    add_norm.is_plain_norm = lambda norm: True
    turns, chosen = defaultdict(itertools.count), []

    def choose(self, bs, fallback=(), extra=0.0, latency=None):
        possible = [length for length in self._lengths if self._cost(bs, length) < math.inf]
        length = possible[next(turns[bs]) % len(possible)]
        self._pending.append((length, fallback))
        chosen.append(length)
        return length

    LengthChooser.choose = choose

    step = DFlashWorker.forward_batch_generation

    @functools.wraps(step)
    def recorded(worker, batch, *args, **kwargs):
        is_cycle, bs = batch.forward_mode.is_decode(), batch.batch_size()
        result = step(worker, batch, *args, **kwargs)
        if is_cycle and os.path.exists(RECORDS):
            with open(RECORDS, "a") as f:
                record = {"bs": bs, "num_tokens": chosen[-1], "replayed": result.can_run_cuda_graph}
                f.write(json.dumps(record) + "\n")
        return result

    DFlashWorker.forward_batch_generation = recorded
