"""What SGLang must know of DFLASH where it sizes and fills its pools: captured layers, KV layers, room for blocks."""

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


def leave_room_for_blocks(result, scheduler, req) -> None:
    """AFTER `Scheduler.init_req_max_new_tokens`, which ends a request before it outgrows the KV pool.

    A decode step needs room for `get_alloc_reserve_per_decode` slots past the committed length. SGLang fails the last
    request of a batch for which there is none, so a request has to end before; its first token needs no decode step.
    """
    if not scheduler.spec_algorithm.is_dflash():
        return
    pool_size = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = pool_size - get_alloc_reserve_per_decode(scheduler.server_args) - len(req.origin_input_ids)
    req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, max(room, 1))
