"""Numbers of requests for which FA3 splits keys in a prefill, on a GPU with 132 multiprocessors."""

import pytest

from sglang_dflash.attention.fa3_prefill import requests_with_splits

# Per number of heads and of KV heads: the most requests by tokens of the graph.
EXPECTED = {
    (32, 8): {4: 33, 32: 33, 48: 16, 64: 16, 128: 8, 256: 4, 272: 0, 512: 0},
    (9, 3): {64: 44, 512: 7, 896: 4, 960: 0},
    (64, 8): {16: 33, 64: 8, 128: 4, 144: 0},
    (16, 16): {128: 16, 512: 4, 544: 0},
}


@pytest.mark.parametrize("heads", EXPECTED, ids=str)
def test_requests_with_splits(heads):
    assert {tokens: requests_with_splits(tokens, *heads, 132) for tokens in EXPECTED[heads]} == EXPECTED[heads]
