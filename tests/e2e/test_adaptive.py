"""`--speculative-adaptive`: the same answers with fewer verified tokens.

The drafter has convolutions over the rows of a block, and pairs. Both see blocks of every length.
"""

import pytest
from checkpoints import zlab_dflash2
from serving import PLAIN_SYNC, TREES_ON_A_GPU, Settings, trees
from various import various_requests


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return zlab_dflash2(tmp_path_factory.mktemp("drafters") / "parts")


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        pytest.param((), {1, 4, 8, 12, 16}, id="chains"),
        pytest.param(trees(16, 16), {1, 4, 8, 16}, marks=pytest.mark.cpu(reason=TREES_ON_A_GPU), id="trees"),
    ],
)
def test_fewer_rows(keeper, prompts, mixed_prompts, drafter, flags, lengths):
    dflash_flags = (("speculative-draft-model-path", str(drafter)), ("speculative-adaptive", True), *flags)
    pair = keeper.pair(Settings("adaptive", dflash_flags=dflash_flags, plain=PLAIN_SYNC))
    requests = various_requests([*mixed_prompts, *prompts[:16]])

    pair.lossless(lambda server: server.generate_concurrently(requests))

    pair.dflash.wait_until_empty()
    described = pair.dflash.get("/server_info")["internal_states"][0]["sglang_dflash"]
    # A CPU has no graphs.
    assert described["adaptive_graphs"] is None
    blocks = {int(rows): count for rows, count in described["blocks_by_verified_rows"].items()}
    # Draft lengths are tried from one on; longer ones as long as they may pay.
    assert {1, 4} <= set(blocks) <= lengths
    assert sum(blocks.values()) == described["verified_blocks"]
    # A draft can be accepted only if it was verified.
    assert all(0 <= rate <= 1 for rate in described["acceptance_rate_by_position"])
