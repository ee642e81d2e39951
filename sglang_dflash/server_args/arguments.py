"""DFLASH in SGLang's resolution of arguments: the hooks, in the order in which they run.

`ServerArgs` keeps what the user said. What SGLang and this package make of it is declared next to it during resolution
(`declare_resolution`), and read through a view (`resolving_view`). :func:`handle_dflash` replaces SGLang's
`speculative_hook._handle_dflash`.
"""

from __future__ import annotations

import logging

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.runtime_context import get_disagg, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash import hooks
from sglang_dflash.checkpoint.config import DFlashConfig, TargetFacts, resolve_block_size, resolve_tree
from sglang_dflash.checkpoint.tensors import check_quantized_layers
from sglang_dflash.recurrent.arguments import check_arguments as check_recurrent_arguments
from sglang_dflash.recurrent.arguments import check_num_nodes
from sglang_dflash.server_args import adaptive, backends, pair, prefill_graphs, refusals, tokenizer_workers, trees

logger = logging.getLogger(__name__)

# Most requests at a time by default. SGLang's speculative workers have 48. An H200 serves 64 clients of an 8B
# faster with 64. States of recurrent layers take the memory that more requests would need.
_MAX_RUNNING, _MAX_RUNNING_RECURRENT = 64, 48
_SOURCE = "sglang_dflash"


def is_dflash(server_args: ServerArgs) -> bool:
    """Return whether a server speculates with DFLASH, as far as its arguments are resolved."""
    # The user's value is not enough: with --enable-return-aux-hidden-states SGLang speculates nothing.
    algorithm = resolving_view(server_args).speculative_algorithm
    return algorithm is not None and algorithm.upper() == "DFLASH"


def serves_dflash() -> bool:
    """Return whether the server of this process speculates with DFLASH; for processes that are configured."""
    return SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm).is_dflash()


def runs_cycles() -> bool:
    """Return whether the server of this process decodes; one that prefills for others does not."""
    return get_disagg().disaggregation_mode != "prefill"


def begin_resolution(result: None, server_args: ServerArgs) -> None:
    """AFTER `validation_hook.handle_aux_hidden_state_capture`, which settles the algorithm before others read it."""
    if is_dflash(server_args):
        trees.hide_candidates(server_args)


def resolve_speculative_arguments(original, server_args: ServerArgs) -> None:
    """AROUND `speculative_hook.handle_speculative_decoding`, which completes some arguments and opens the drafter."""
    if not is_dflash(server_args):
        original(server_args)
        return
    hooks.verify()
    refusals.refuse_unsupported(server_args)
    tokenizer_workers.choose_http_app(server_args)
    pair.load_drafter_config(server_args)
    refusals.check_draft_window(server_args)
    refusals.check_graphs(server_args)
    adaptive.check_arguments(server_args)
    refusals.check_lora(server_args)
    cfg = resolving_view(server_args)
    if cfg.speculative_use_block_verification:
        declare_resolution(server_args, _SOURCE, speculative_use_block_verification=False)
        logger.info(
            "--speculative-use-block-verification changes nothing: DFLASH's drafts are greedy, and of those a block is "
            "accepted as often token by token."
        )
    # SGLang would switch it off with a warning, since its own is for EAGLE.
    declare_resolution(server_args, _SOURCE, speculative_adaptive=False)
    original(server_args)
    refusals.check_deterministic(server_args)
    adaptive.check_deterministic(server_args)
    declare_resolution(server_args, _SOURCE, speculative_adaptive=adaptive.is_adaptive(server_args))
    # `overrides.max_speculative_num_draft_tokens` keeps it here. It would compute it from EAGLE's steps.
    is_recurrent = pair.target_facts(server_args).is_recurrent
    server_args._max_speculative_num_draft_tokens = trees.max_nodes(server_args, is_recurrent)


def handle_dflash(server_args: ServerArgs) -> None:
    """Check and complete the arguments of a server that was asked for DFLASH.

    Raises:
        ConfigError: naming the flag or checkpoint field, and its value.
    """
    # Also here, in case the hook around `handle_speculative_decoding` is the one that did not take.
    hooks.verify()
    cfg = resolving_view(server_args)
    hf_config = pair.read_drafter(server_args)
    drafter = DFlashConfig.from_dict(hf_config.to_dict(), cfg.speculative_draft_model_path)
    target = pair.target_facts(server_args)
    drafter.check_target(target)
    if target.is_recurrent:
        check_recurrent_arguments(server_args)
    drafter.check_tensor_parallel(cfg.tp_size)
    check_quantized_layers(drafter, cfg.tp_size)
    pair.check_context_length(server_args, hf_config)
    refusals.check_dtypes(server_args, drafter)
    refusals.check_host_cache(server_args, drafter, target)
    refusals.check_disaggregation(server_args, target)
    refusals.check_eagle_shape(server_args)
    block_size, num_rows = _resolve_sizes(server_args, drafter, target)
    choices = backends.draft_attention_backends(server_args)
    backend = backends.draft_attention_backend(server_args, choices)
    drafter.check_attention_backend(backend, block_size, choices)
    load_format = pair.draft_load_format(server_args)
    pair.check_local_tensors(server_args, drafter, load_format)
    declare_resolution(
        server_args,
        _SOURCE,
        speculative_draft_load_format=load_format,
        speculative_num_draft_tokens=num_rows,
        speculative_dflash_block_size=block_size,
        # EAGLE's shape: SGLang's KV accounting reads it for every algorithm. The user's value stays in `server_args`,
        # for `trees.num_candidates`.
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_draft_attention_backend=backend,
        # SGLang takes the target's by default.
        speculative_draft_model_quantization=refusals.draft_quantization(server_args),
    )
    reason = trees.reason_for_chains(server_args)
    if reason is not None:
        logger.info("Drafts are verified in chains, not in trees: %s.", reason)
    _complete(server_args, target)
    prefill_graphs.choose(server_args, target)


def _resolve_sizes(server_args: ServerArgs, drafter: DFlashConfig, target: TargetFacts) -> tuple[int, int]:
    """Return the tokens of a block, and the tokens of a request that the target verifies."""
    cfg = resolving_view(server_args)
    sizes = (drafter.block_size, cfg.speculative_dflash_block_size, cfg.speculative_num_draft_tokens)
    if trees.asks_for_trees(server_args):
        block_size, num_rows = resolve_tree(*sizes)
    else:
        block_size = num_rows = resolve_block_size(*sizes)
    if target.is_recurrent:
        check_num_nodes(num_rows)
    if block_size < drafter.block_size:
        logger.info("DFLASH serves blocks of %d; the drafter was trained with %d.", block_size, drafter.block_size)
    return block_size, num_rows


def _complete(server_args: ServerArgs, target: TargetFacts) -> None:
    """Set what the user has left out and SGLang's default does not suit."""
    cfg = resolving_view(server_args)
    if cfg.enable_memory_saver and not (cfg.enable_weights_cpu_backup or cfg.enable_draft_weights_cpu_backup):
        declare_resolution(server_args, _SOURCE, enable_draft_weights_cpu_backup=True)
        logger.info(
            "The drafter's weights are kept in host memory while their GPU memory is released: updates of the target's "
            "weights bring none for the drafter."
        )
    if cfg.max_running_requests is None:
        running = _MAX_RUNNING_RECURRENT if target.is_recurrent else _MAX_RUNNING
        declare_resolution(server_args, _SOURCE, max_running_requests=running)
        logger.info("DFLASH serves up to %d requests at a time; --max-running-requests changes that.", running)
