"""Draft length: the flags that ask for one that adapts or for a fixed one, and where it adapts without a flag.

SGLang's `--speculative-adaptive` can only be given, and a Python `Engine` cannot tell False from no argument. So
`--speculative-adaptive-config` has a value that says no.
"""

from __future__ import annotations

import logging

from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args.backends import device_type

logger = logging.getLogger(__name__)

# Value of `--speculative-adaptive-config` for a fixed draft length.
FIXED = "fixed"
# Devices on which the draft length adapts by default. A CPU would have to try longer drafts to know their cost.
ADAPTIVE_DEVICES = ("cuda",)


def check_arguments(server_args: ServerArgs) -> None:
    """Refuse what an adaptive draft length does not go with, before SGLang completes other arguments."""
    cfg = resolving_view(server_args)
    config = server_args.speculative_adaptive_config
    if config not in (None, FIXED):
        raise ConfigError(
            f"--speculative-adaptive-config {config}: DFLASH measures which draft length is best; leave it out, or "
            f"give {FIXED} for one length."
        )
    if not cfg.speculative_adaptive:
        return
    if config == FIXED:
        raise ConfigError(f"--speculative-adaptive and --speculative-adaptive-config {FIXED}: leave one of them out.")
    # On a GPU each number of verified tokens has its graphs.
    if not _has_graphs(server_args) and device_type(server_args) != "cpu":
        raise ConfigError(
            "--speculative-adaptive verifies in CUDA graphs, and those of decoding are disabled: leave out "
            "--disable-cuda-graph, --disable-decode-cuda-graph and --cuda-graph-backend-decode."
        )
    flag = lora_flag(server_args)
    if flag is not None:
        raise ConfigError(
            f"{flag} with --speculative-adaptive is not supported: graphs of all draft lengths would share the table "
            "that names each token's adapter, which SGLang makes for one length; leave one of them out."
        )


def check_deterministic(server_args: ServerArgs) -> None:
    """Refuse backends whose results depend on the draft length, under `--enable-deterministic-inference`."""
    cfg = resolving_view(server_args)
    # FlashInfer chooses its tile of keys by the number of verified tokens, and the tile decides how a sum rounds.
    if (
        asks_for_adaptive(server_args)
        and cfg.enable_deterministic_inference
        and "flashinfer" in attention_backends_of(cfg)
    ):
        raise ConfigError(
            "--speculative-adaptive with --enable-deterministic-inference needs --attention-backend fa3 or triton: "
            "flashinfer's results depend on how many tokens of a block are verified."
        )


def asks_for_adaptive(server_args: ServerArgs) -> bool:
    """Return whether a flag asks for an adaptive draft length, so that an obstacle is an error."""
    return server_args.speculative_adaptive


def is_adaptive(server_args: ServerArgs) -> bool:
    """Return whether the draft length adapts, as far as flags decide it.

    Where it adapts by default and cannot, the log says why.
    """
    if asks_for_adaptive(server_args):
        return True
    # A prefill server runs no cycles.
    is_prefill_server = resolving_view(server_args).disaggregation_mode == "prefill"
    if (
        server_args.speculative_adaptive_config == FIXED
        or is_prefill_server
        or device_type(server_args) not in ADAPTIVE_DEVICES
    ):
        return False
    obstacle = default_obstacle(server_args)
    if obstacle is not None:
        log_fixed(obstacle)
    return obstacle is None


def default_obstacle(server_args: ServerArgs) -> str | None:
    """Return why the draft length does not adapt by default; None: nothing is against it."""
    cfg = resolving_view(server_args)
    if not _has_graphs(server_args):
        return "CUDA graphs of decoding are disabled"
    flag = lora_flag(server_args)
    if flag is not None:
        return f"SGLang's graphs with {flag} are for one length"
    if cfg.rl_on_policy_target is not None:
        return f"results would not always round as --rl-on-policy-target {cfg.rl_on_policy_target} asks"
    if cfg.enable_deterministic_inference:
        return "the choice depends on measured times, and --enable-deterministic-inference excludes what they change"
    return None


def log_fixed(obstacle: str) -> None:
    """Log that the draft length is fixed where it adapts by default."""
    logger.info("The draft length is fixed: %s.", obstacle)


def lora_flag(server_args: ServerArgs) -> str | None:
    """Return the flag by which the target has LoRA adapters; None: it has none."""
    cfg = resolving_view(server_args)
    # SGLang enables LoRA for adapters later in resolution.
    if not (cfg.enable_lora or (cfg.enable_lora is None and cfg.lora_paths)):
        return None
    return "--enable-lora" if cfg.enable_lora else "--lora-paths"


def _has_graphs(server_args: ServerArgs) -> bool:
    return resolving_view(server_args).cuda_graph_config.decode.backend != Backend.DISABLED
