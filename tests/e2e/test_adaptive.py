"""`--speculative-adaptive`: the same answers with fewer verified tokens."""

from serving import PLAIN_SYNC, Settings
from various import various_requests

ADAPTIVE = Settings("adaptive", dflash_flags=(("speculative-adaptive", True),), plain=PLAIN_SYNC)


def test_fewer_rows(keeper, prompts, mixed_prompts):
    pair = keeper.pair(ADAPTIVE)
    requests = various_requests([*mixed_prompts, *prompts])

    pair.lossless(lambda server: server.generate_concurrently(requests))

    pair.dflash.wait_until_empty()
    described = pair.dflash.get("/server_info")["internal_states"][0]["sglang_dflash"]
    # A CPU has no graphs.
    assert described["adaptive_graphs"] is None
    blocks = {int(rows): count for rows, count in described["blocks_by_verified_rows"].items()}
    # Draft lengths are tried from one on; longer ones as long as they may pay.
    assert {1, 4} <= set(blocks) <= {1, 4, 8, 12, 16}
    assert sum(blocks.values()) == described["verified_blocks"]
    # A draft can be accepted only if it was verified.
    assert all(0 <= rate <= 1 for rate in described["acceptance_rate_by_position"])
