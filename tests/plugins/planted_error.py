"""Plugin for the tests: decode cycles with an error, which the fuzzer must find.

`support.plugins` installs it. `PLANTED_ERROR` says which error: `token`, `logprob` or `page`.
"""

from __future__ import annotations

import functools
import os

ERROR = os.environ.get("PLANTED_ERROR")


def register() -> None:
    if ERROR is None:
        return
    from sglang_dflash.engine.worker import DFlashWorker

    end_cycle = DFlashWorker._end_cycle

    @functools.wraps(end_cycle)
    def planted(worker, batch, *args):
        result = end_cycle(worker, batch, *args)
        if ERROR == "token":
            # The text goes on as if it had been the right one.
            result.next_token_ids[0] ^= 1
        elif ERROR == "logprob" and batch.return_logprob:
            result.logits_output.next_token_logprobs += 0.01
        elif ERROR == "page":
            batch.token_to_kv_pool_allocator.alloc(batch.token_to_kv_pool_allocator.page_size)
        return result

    DFlashWorker._end_cycle = planted
