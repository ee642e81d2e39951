"""How often FA3 splits keys in a prefill, and for how many requests, on a GPU with 132 multiprocessors."""

import pytest

from sglang_dflash.attention.fa3_prefill import splits

# Per number of heads and of KV heads: splits and the most requests by tokens of the graph.
EXPECTED = {
    (32, 8): {4: (16, 33), 32: (16, 33), 48: (8, 16), 64: (8, 16), 128: (4, 8), 256: (2, 4), 272: (1, 0), 512: (1, 0)},
    (9, 3): {64: (22, 44), 512: (3, 7), 896: (2, 4), 960: (1, 0)},
    (64, 8): {16: (16, 33), 64: (4, 8), 128: (2, 4), 144: (1, 0)},
    (16, 16): {128: (8, 16), 512: (2, 4), 544: (1, 0)},
}


@pytest.mark.parametrize("heads", EXPECTED, ids=str)
def test_splits(heads):
    assert {tokens: splits(tokens, *heads, 132) for tokens in EXPECTED[heads]} == EXPECTED[heads]
