"""Trees or chains: the flag that asks for them, and what is verified without it."""

from __future__ import annotations

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.config import DEFAULT_CANDIDATES, MAX_NODES, MIN_NODES
from sglang_dflash.server_args.backends import device_type

# Devices on which trees are verified by default, because their extra tokens cost nothing there.
TREE_DEVICES = ("cuda",)
# How many times as many nodes trees may have in small batches, where a GPU waits for weights. Trees of 32 commit 1.09
# times as much as trees of 16 (SmolLM2, scripts/results/cycle_notes.md).
SMALL_BATCH_FACTOR = 2


def hide_candidates(server_args: ServerArgs) -> None:
    """Resolve the other arguments as if `--speculative-eagle-topk` were left out.

    SGLang takes the flag for EAGLE's, whose trees and paged chains need other attention backends. DFLASH brings its own
    attention for trees, so the flag must not move the target to another backend. `server_args` keeps the user's value.
    """
    declare_resolution(server_args, "sglang_dflash", speculative_eagle_topk=None)


def asks_for_trees(server_args: ServerArgs) -> bool:
    """Return whether `--speculative-eagle-topk` asks for trees; :func:`verifies_trees` says what is served."""
    return (server_args.speculative_eagle_topk or 1) > 1


def verifies_trees(server_args: ServerArgs) -> bool:
    """Return whether drafts are verified in trees, as far as the target allows it. Otherwise they are chains.

    Without `--speculative-eagle-topk` a GPU verifies trees with as many nodes as a block has tokens.
    """
    if server_args.speculative_eagle_topk is not None:
        return asks_for_trees(server_args)
    return device_type(server_args) in TREE_DEVICES and default_tree_obstacle(server_args) is None


def max_nodes(server_args: ServerArgs, is_recurrent: bool) -> int:
    """Return the largest number of tokens of a request that the target verifies: more nodes in small batches.

    That is where the number adapts and no flag gives it.

    Args:
        is_recurrent: the target has recurrent layers. They compare all nodes with each other, so more of them cost
            time in small batches too.
    """
    cfg = resolving_view(server_args)
    num_nodes = cfg.speculative_num_draft_tokens
    # Buffers are sized for as many rows as the largest batch has with N. SGLang sizes the exchange of expert-parallel
    # ranks by the largest number, for batches of any size.
    grows = (
        cfg.speculative_adaptive
        and device_type(server_args) in TREE_DEVICES
        and verifies_trees(server_args)
        and server_args.speculative_num_draft_tokens is None
        and not is_recurrent
        and cfg.max_running_requests > 1
        and cfg.moe_a2a_backend == "none"
        and SMALL_BATCH_FACTOR * num_nodes <= MAX_NODES
    )
    return SMALL_BATCH_FACTOR * num_nodes if grows else num_nodes


def num_candidates(server_args: ServerArgs) -> int:
    """Return the candidates for every position of a tree or a chain of drafts."""
    return server_args.speculative_eagle_topk if asks_for_trees(server_args) else DEFAULT_CANDIDATES


def default_tree_obstacle(server_args: ServerArgs) -> str | None:
    """Return why a server without `--speculative-eagle-topk` verifies chains; None: nothing is against trees."""
    cfg = resolving_view(server_args)
    num_nodes = cfg.speculative_num_draft_tokens
    if cfg.rl_on_policy_target is not None:
        return f"a tree's results do not round as --rl-on-policy-target {cfg.rl_on_policy_target} asks"
    if cfg.enable_deterministic_inference:
        return "a tree's results depend on its batch, which --enable-deterministic-inference excludes"
    if not MIN_NODES <= num_nodes <= MAX_NODES:
        return f"blocks of {num_nodes} tokens are no trees, which have {MIN_NODES} to {MAX_NODES} nodes"
    return None


def reason_for_chains(server_args: ServerArgs) -> str | None:
    """Return why a server verifies chains where neither a flag asks for them nor its device; None: nothing is against
    trees, or `--speculative-eagle-topk` is given."""
    if server_args.speculative_eagle_topk is not None or device_type(server_args) not in TREE_DEVICES:
        return None
    return default_tree_obstacle(server_args)
