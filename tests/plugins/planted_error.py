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
