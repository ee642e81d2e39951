"""Where in a run of accepted tokens a request ends: there where it would if they had come one by one.

SGLang looks at the run of a cycle as a whole, by kinds: at stop strings in the order of the request, then at
`stop_regex`, at stop tokens, at the length. What it finds first need not be what comes first in the text.
"""

from __future__ import annotations

import weakref

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.server_args.arguments import serves_dflash

# Of requests that fail within the run that the scheduler is about to append to their output: how many of its tokens are
# before that, and how they end.
_failing: weakref.WeakKeyDictionary[Req, tuple[int, FINISH_ABORT]] = weakref.WeakKeyDictionary()


def fail(req: Req, num_tokens: int, reason: FINISH_ABORT) -> None:
    """End a request behind so many tokens of its next run, if none of them ends it."""
    _failing[req] = num_tokens, reason


def update_finish_state(original, req: Req, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: whether one of the last tokens of the output ends the request, and which."""
    failing = _failing.pop(req, None) if _failing else None
    if req.finished():
        return
    _end(original, req, new_accepted_len, failing)
    if req.finished_len is not None:
        _forget_reasoning_behind_end(req)


def _end(original, req: Req, new_accepted_len: int, failing: tuple[int, FINISH_ABORT] | None) -> None:
    before = len(req.output_ids) - new_accepted_len
    if failing is not None:
        num_tokens, failure = min(failing[0], new_accepted_len), failing[1]
        # A grammar has refused what stands in for the token that is missing.
        req.to_finish = None
        _end_at_first(original, req, before, num_tokens)
        if not req.finished():
            req.finished_reason, req.finished_len = failure, before + num_tokens
        return
    is_ended = req.to_finish is not None
    if new_accepted_len <= 1 or not (is_ended or _has_text(req)) or not serves_dflash():
        # Of stop tokens and the length, SGLang takes the first itself.
        original(req, new_accepted_len)
    elif is_ended:
        # By somebody else, as if at the next token.
        original(req, new_accepted_len)
        req.finished_len = before + 1
    else:
        _end_at_first(original, req, before, new_accepted_len)


def _forget_reasoning_behind_end(req: Req) -> None:
    """SGLang has counted the whole run. Reasoning begins with the output, so that its tokens are as many as those
    before its end, if the end comes first. What opens it may be incomplete there: then there is none."""
    if req._think_start_match_len > req.finished_len:
        req.reasoning_tokens = 0
    else:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _has_text(req: Req) -> bool:
    """Whether text may end a request."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def _end_at_first(original, req: Req, before: int, num_tokens: int) -> None:
    """End a request at the first of the `num_tokens` tokens behind the `before` first that ends it, if one does."""
    if num_tokens == 0:
        return
    _update_before(original, req, before + num_tokens, num_tokens)
    if not (req.finished() and _has_text(req)):
        return
    # One of them does; which comes first shows when they are looked at one by one.
    req.finished_reason = req.finished_len = None
    for end in range(before + 1, before + num_tokens + 1):
        _update_before(original, req, end, 1)
        if req.finished():
            return


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
