"""End a request at the first of a cycle's tokens that ends it, as if the tokens had been decoded one by one.

SGLang checks all tokens of a cycle at once, condition by condition: stop strings in the order of the request,
`stop_regex`, stop tokens, length. The first condition that holds may not be the first one in the text.
"""

from __future__ import annotations

import weakref

from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_dflash.server_args.arguments import serves_dflash

# Requests that fail within the tokens that the scheduler is about to append: number of tokens before that, and reason.
_failing: weakref.WeakKeyDictionary[Req, tuple[int, FINISH_ABORT]] = weakref.WeakKeyDictionary()


def fail(req: Req, num_tokens: int, reason: FINISH_ABORT) -> None:
    """End a request after `num_tokens` of the tokens of this cycle, unless one of them ends it."""
    _failing[req] = num_tokens, reason


def update_finish_state(original, req: Req, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: end the request at the first of its last tokens that ends it."""
    failing = _failing.pop(req, None) if _failing else None
    if req.finished():
        return
    _end(original, req, new_accepted_len, failing)
    if req.finished_len is not None:
        _forget_reasoning_after_end(req)


def leave_out_what_follows(original, last_req: Req, req: TokenizedGenerateReqInput, session_params: SessionParams):
    """AROUND `Session._concat_token_arrays`: begin the next turn of a session where the answer of the last one ended.

    SGLang takes all tokens of the last cycle.
    """
    if last_req.finished_len is not None and serves_dflash():
        del last_req.output_ids[last_req.finished_len :]
    return original(last_req, req, session_params)


def _end(original, req: Req, new_accepted_len: int, failing: tuple[int, FINISH_ABORT] | None) -> None:
    before = len(req.output_ids) - new_accepted_len
    if failing is not None:
        num_tokens, failure = min(failing[0], new_accepted_len), failing[1]
        # A grammar has refused the placeholder of the missing token, which must not end the request.
        req.to_finish = None
        _end_at_first(original, req, before, num_tokens)
        if not req.finished():
            req.finished_reason, req.finished_len = failure, before + num_tokens
        return
    is_ended = req.to_finish is not None
    if new_accepted_len <= 1 or not (is_ended or _has_text(req)) or not serves_dflash():
        # SGLang finds the first of stop tokens and length itself.
        original(req, new_accepted_len)
    elif is_ended:
        # An abort takes effect at the next token.
        original(req, new_accepted_len)
        req.finished_len = before + 1
    else:
        _end_at_first(original, req, before, new_accepted_len)


def _forget_reasoning_after_end(req: Req) -> None:
    """Correct `reasoning_tokens`, which SGLang has counted over all tokens of the cycle.

    Reasoning begins with the output, so it has at most as many tokens as the output. If its opening tag is incomplete
    at the end of the request, there is no reasoning.
    """
    if req._think_start_match_len > req.finished_len:
        req.reasoning_tokens = 0
    else:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _has_text(req: Req) -> bool:
    """Return True if text may end a request."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def _end_at_first(original, req: Req, before: int, num_tokens: int) -> None:
    """End a request at the first token that ends it, among `num_tokens` after the first `before`."""
    if num_tokens == 0:
        return
    _update_before(original, req, before + num_tokens, num_tokens)
    if not (req.finished() and _has_text(req)):
        return
    # One of them ends it. Check them one by one to find the first.
    req.finished_reason = req.finished_len = None
    for end in range(before + 1, before + num_tokens + 1):
        _update_before(original, req, end, 1)
        if req.finished():
            return


def _update_before(original, req: Req, end: int, new_accepted_len: int) -> None:
    """Call `Req.update_finish_state` as if the output ended before token `end`."""
    output_ids, grammar = req.output_ids, req.grammar
    if end < len(output_ids):
        req.output_ids = output_ids[:end]
        # It has already advanced past this token.
        req.grammar = None
    try:
        original(req, new_accepted_len)
    finally:
        req.output_ids, req.grammar = output_ids, grammar
