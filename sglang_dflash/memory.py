"""What SGLang must know of the drafter before it sizes its pools: captured layers, KV layers, row headroom."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from sglang_dflash.arguments import is_dflash, load_drafter_config


def resolve_target_capture(original, *, config, server_args, model_config, spec_algorithm, is_draft_worker) -> None:
    """AROUND `spec_aux_hidden_state._resolve_dflash_aux_hidden_state`.

    Fills `config` (`SpecAuxHiddenStateConfig`) of the target's model runner with the layers to capture and the
    number of drafter layers that share the KV budget.
    """
    if not spec_algorithm.is_dflash():
        original(
            config=config,
            server_args=server_args,
            model_config=model_config,
            spec_algorithm=spec_algorithm,
            is_draft_worker=is_draft_worker,
        )
        return
    if is_draft_worker:
        return
    drafter = load_drafter_config(server_args)
    config.dflash_use_aux_hidden_state = True
    config.dflash_draft_num_layers = len(drafter.layers)
    config.dflash_target_layer_ids = list(drafter.target_layer_ids)


def req_to_token_headroom(original, server_args) -> int:
    """AROUND `allocation_sizing.get_req_to_token_extra_context_len`, in entries of a `req_to_token` row.

    A decode step reserves `get_alloc_reserve_per_decode` slots past the committed length, whatever the page size.
    """
    extra = original(server_args)
    if not is_dflash(server_args):
        return extra
    return max(extra, get_alloc_reserve_per_decode(server_args) + server_args.page_size)
