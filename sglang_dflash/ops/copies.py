"""Copies: tokens that followed the end of a request's text when the text had it before. The drafter does not know them.

Edits, extracts and answers from a passage repeat long parts of their prompt. The text of each request is kept on the
device. Its end is looked up in it: of the earlier places with the longest match, the most recent. The tokens after that
place are the copy. It is one path of drafts. A tree has the nodes that it would have anyway, of which some may be the
copy's.
"""

from __future__ import annotations

import torch

# Tokens of a text that are kept, its last ones; 64 KiB. A ring: the token at position p is at p % TEXT_SIZE.
TEXT_SIZE = 1 << 14
TEXT_DTYPE = torch.int32
# Stands in texts for tokens outside of the vocabulary, as images have. No copy has it.
NO_TOKEN = -1
# Shorter matches than MIN_MATCH are none. Longer ones than LOOKUP are not preferred to each other. A length is counted
# up to MAX_MATCH.
MIN_MATCH, LOOKUP, MAX_MATCH = 3, 6, 64
# After M tokens that match, the copy's token has the probability M / (M + DOUBT), at most MAX_WEIGHT.
DOUBT, MAX_WEIGHT = 4.0, 0.95


def weights(lens: torch.Tensor, depths: int) -> torch.Tensor:
    """Return the probability that the copy's next token is right, whatever the drafter says.

    Args:
        lens: [bs] integers. Tokens that match before the copy.
        depths: D.

    Returns:
        [bs, D] float32. At depth d the d tokens of the copy match, too.
    """
    matching = (lens[:, None] + torch.arange(depths, device=lens.device)).to(torch.float32)
    return (matching / (matching + DOUBT)).clamp(max=MAX_WEIGHT)
