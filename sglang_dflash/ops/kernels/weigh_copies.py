"""Copies of the request's own text in the table of conditionals, inside the kernels that fill it."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.ops import copies

_DOUBT = tl.constexpr(copies.DOUBT)
_MAX_WEIGHT = tl.constexpr(copies.MAX_WEIGHT)


@triton.jit
def load_copy(places, lens, request, depth, DEPTHS: tl.constexpr):
    """Return the copied candidate of a position and of the one before, and how many tokens match before this one."""
    at = places + request * DEPTHS + depth
    return tl.load(at), tl.load(at - 1, mask=depth > 0, other=0), tl.load(lens + request) + depth


@triton.jit
def weigh_copies(log_prob, place, before, matching, depth, column, above):
    """Return the log probabilities with the copy; see :func:`sglang_dflash.ops.reference.weigh_copies.weigh_copies`.

    Args:
        log_prob: [PADDED, ROWS]. Of candidates of one position, after candidates of the position before.
        place, before, matching: of :func:`load_copy`.
        column: [PADDED]. Which candidate a row of the tile is.
        above: [ROWS]. Which candidate of the position before a column of the tile is.
    """
    matching = matching.to(tl.float32)
    weight = tl.minimum(matching / (matching + _DOUBT), _MAX_WEIGHT)
    copied = tl.log(weight + (1.0 - weight) * tl.exp(log_prob))
    changed = tl.where((column == place)[:, None], copied, log_prob + tl.log(1.0 - weight))
    # All rows of the table's first position belong to the bonus token.
    is_changed = (place >= 0) & ((above == before) | (depth == 0))
    return tl.where(is_changed[None, :], changed, log_prob)
