"""How often FA3 splits keys in a prefill, and for how many requests, on a GPU with 132 multiprocessors."""

import pytest

from sglang_dflash.attention.fa3_prefill import splits

# Per number of heads, of KV heads, and head size: splits and the most requests by tokens of the graph.
EXPECTED = {
    (32, 8, 128): {4: (16, 8), 32: (16, 8), 48: (8, 8), 128: (4, 8), 256: (2, 8), 272: (1, 0), 512: (1, 0)},
    (9, 3, 64): {64: (44, 22), 512: (5, 22), 1344: (2, 22), 1408: (2, 22), 1409: (1, 0)},
    (64, 8, 128): {16: (16, 8), 64: (4, 8), 128: (2, 8), 144: (1, 0)},
    (16, 16, 96): {192: (8, 4), 768: (2, 4), 832: (1, 0)},
}


@pytest.mark.parametrize("heads", EXPECTED, ids=str)
def test_splits(heads):
    assert {tokens: splits(tokens, *heads, 132) for tokens in EXPECTED[heads]} == EXPECTED[heads]
