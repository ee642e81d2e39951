"""Trees by default, as on a GPU (tests/plugins/default_trees.py)."""

import pytest
from serving import Settings, with_plugin

PLUGIN = with_plugin("default_trees")
DEFAULT_TREES = Settings("default-trees", env=PLUGIN)
ASKED_FOR_CHAINS = Settings("asked-for-chains", dflash_flags=(("speculative-eagle-topk", 1),), env=PLUGIN)
TWO_ROWS = Settings("two-rows", dflash_flags=(("speculative-dflash-block-size", 2),), env=PLUGIN)
OBSTACLE = Settings("obstacle", env=(*PLUGIN, ("DEFAULT_TREES_OBSTACLE", "the target is another")))

pytestmark = pytest.mark.cpu(reason="servers of float32 on a GPU verify no trees; tests/gpu has those of bf16")


def served(pair, prompts) -> tuple[str, int]:
    """Return what is verified, and of how many tokens, by a server whose text equals the text without speculation."""
    requests = [{"input_ids": prompt, "max_new_tokens": 40, "ignore_eos": True} for prompt in prompts[:6]]
    pair.lossless(lambda server: server.generate_concurrently(requests))
    described = pair.dflash.get("/server_info")["internal_states"][0]["sglang_dflash"]
    assert described["candidates_per_position"] == 16
    return described["verified_as"], described["verified_rows"]


@pytest.mark.parametrize("settings", [DEFAULT_TREES], indirect=True, ids=str)
def test_as_many_nodes_as_a_block_has_tokens(pair, prompts):
    assert served(pair, prompts) == ("trees", 16)
    assert pair.dflash.log().count("Drafts are verified in trees of up to 16 nodes; ") == 1


@pytest.mark.parametrize("settings", [ASKED_FOR_CHAINS, TWO_ROWS], indirect=True, ids=str)
def test_chains(settings, pair, prompts):
    """A block of two tokens gives no tree."""
    assert served(pair, prompts) == ("chains", 2 if settings == TWO_ROWS else 16)
    assert "Drafts are verified in trees" not in pair.dflash.log()


@pytest.mark.parametrize("settings", [OBSTACLE], indirect=True, ids=str)
def test_targets_that_have_no_trees(pair, prompts):
    assert served(pair, prompts) == ("chains", 16)
    assert "Drafts are verified in chains, not in trees: the target is another." in pair.dflash.log()
