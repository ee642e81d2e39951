"""Test plugin: log what each tensor-parallel rank draws for sampled requests.

`support.plugins` installs it.
"""

import functools
import logging
import zlib

logger = logging.getLogger(__name__)


def register():
    from sglang.srt.runtime_context import get_parallel

    from sglang_dflash import ops

    sample_rows = ops.sample_rows

    @functools.wraps(sample_rows)
    def logged(logits, maxima, tokens, parameters, keys, positions):
        sample_rows(logits, maxima, tokens, parameters, keys, positions)
        if (parameters.top_ks > 1).any():
            values = b"".join(tensor.numpy().tobytes() for tensor in (keys, positions, tokens))
            rank = get_parallel().tp_rank
            logger.warning("Rank %d draws %d tokens: %08x.", rank, len(tokens), zlib.crc32(values))

    ops.sample_rows = logged
