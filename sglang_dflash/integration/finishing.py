"""Where in a run of accepted tokens a request ends: there where it would if they had come one by one.

SGLang looks at the run of a cycle as a whole, by kinds: at stop strings in the order of the request, then at
`stop_regex`, at stop tokens, at the length. What it finds first need not be what comes first in the text.
"""

from __future__ import annotations

import weakref

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.integration.arguments import serves_dflash

# Of requests that fail within the run that the scheduler is about to append to their output: how many of its tokens are
# before that, and how they end.
_failing: weakref.WeakKeyDictionary[Req, tuple[int, FINISH_ABORT]] = weakref.WeakKeyDictionary()


def fail(req: Req, num_tokens: int, reason: FINISH_ABORT) -> None:
    """End a request behind so many tokens of its next run, if none of them ends it."""
    _failing[req] = num_tokens, reason


def update_finish_state(original, req: Req, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: whether one of the last tokens of the output ends the request, and which."""
    failing = _failing.pop(req, None) if _failing else None
    params = req.sampling_params
    # Of stop tokens and the length, SGLang takes the first itself.
    has_text = bool(params.stop_strs or params.stop_regex_strs)
    is_run = new_accepted_len > 1 and (has_text or req.to_finish is not None)
    if req.finished() or not (failing or (is_run and serves_dflash())):
        original(req, new_accepted_len)
        return
    before = len(req.output_ids) - new_accepted_len
    num_tokens, failure = failing or (new_accepted_len, None)
    if failure is not None:
        # A grammar has refused what stands in for the token that is missing.
        req.to_finish = None
    elif req.to_finish is not None:
        # Somebody else has ended it, as if at the next token.
        original(req, new_accepted_len)
        req.finished_len = before + 1
        return
    num_tokens = min(num_tokens, new_accepted_len)
    if num_tokens > 0:
        _update_before(original, req, before + num_tokens, num_tokens)
        if req.finished() and has_text:
            req.finished_reason = req.finished_len = None
            for end in range(before + 1, before + num_tokens + 1):
                _update_before(original, req, end, 1)
                if req.finished():
                    break
    if failure is not None and not req.finished():
        req.finished_reason, req.finished_len = failure, before + num_tokens


def _update_before(original, req: Req, end: int, new_accepted_len: int) -> None:
    """What `Req.update_finish_state` finds in the output before a token, whose last tokens are new."""
    output_ids, grammar = req.output_ids, req.grammar
    if end < len(output_ids):
        req.output_ids = output_ids[:end]
        # It has been brought to the end of the run.
        req.grammar = None
    try:
        original(req, new_accepted_len)
    finally:
        req.output_ids, req.grammar = output_ids, grammar
