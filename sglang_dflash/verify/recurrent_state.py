"""Targets with recurrent layers: verification runs ahead of what is accepted, and their states must not.

Of Gated DeltaNet layers a verified block leaves behind what every token puts into the state, not the state after each,
which is fifty times larger; once it is known how many tokens are accepted, the states are advanced by these.

This is the only file that knows how SGLang keeps recurrent states, which it calls mamba's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec, mamba_track_grid
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import async_h2d

from sglang_dflash import ops
from sglang_dflash.checkpoint.config import ConfigError
from sglang_dflash.types import BlockInputs, States, StateSlots

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

# Fields of `ServerArgs` that a recurrent target needs as they are here: what the states are kept in, and who computes
# and keeps them. SGLang derives the flag from the field, with dashes.
REQUIRED = {
    "mamba_ssm_dtype": (None, "float32"),
    "linear_attn_backend": (None, "triton"),
    "linear_attn_decode_backend": (None, "triton"),
    "linear_attn_prefill_backend": (None, "triton"),
    "linear_attn_verify_backend": (None, "triton"),
    "enable_linear_replayssm": (False,),
    "enable_linear_replayssm_spec": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "enable_mamba_cache_stochastic_rounding": (False,),
    "mamba_radix_cache_strategy": ("auto", "no_buffer", "extra_buffer"),
    "enable_streaming_session": (False,),
    "enable_mixed_chunk": (False,),
}


def check_arguments(server_args: ServerArgs) -> None:
    """Raise :class:`ConfigError` for the first argument that a recurrent target is not served with.

    Reads what the user has set, and what SGLang has for them.
    """
    cfg, model_config = resolving_view(server_args), model_config_of(server_args)
    path = cfg.model_path
    if "full_attention_interval" not in hybrid_gdn_config(model_config).to_dict():
        raise ConfigError(
            f"full_attention_interval is missing in config.json of target {path}: SGLang takes from it, not from "
            "layer_types, which layers are recurrent."
        )
    for name, allowed in REQUIRED.items():
        for value in (getattr(server_args, name), getattr(cfg, name)):
            if value not in allowed:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is not supported with --speculative-algorithm DFLASH and a "
                    f"target with recurrent layers ({path})."
                )
    dtype = str(model_config.dtype).removeprefix("torch.")
    conv_dtype = envs.SGLANG_MAMBA_CONV_DTYPE.get()
    if conv_dtype != dtype:
        raise ConfigError(
            f"SGLANG_MAMBA_CONV_DTYPE={conv_dtype}: the target {path} is served in {dtype}, and a state that is "
            f"rounded once a block is not the one that is rounded after every token; set it to {dtype}."
        )


@dataclass(frozen=True)
class _Window:
    """What verified tokens put into states, [layers, rows, tokens of a block, ...]; see :class:`BlockInputs`."""

    conv_memory: torch.Tensor
    inputs: BlockInputs

    @classmethod
    def allocate(cls, pool: MambaPool, num_rows: int, block_size: int, num_key_heads: int) -> _Window:
        conv, temporal = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        num_layers, _, num_value_heads, value_size, key_size = temporal.shape
        channels, length = conv.shape[2:]

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            # Whatever is read before it is written must not pass for a number.
            return torch.full((num_layers, num_rows, block_size, *shape), torch.nan, dtype=dtype, device=conv.device)

        # The states of a convolution after one token and the next share all inputs but one. Here the inputs of a token
        # lie beside each other, as they are written.
        shape = (num_layers, num_rows, block_size + length - 1, channels)
        conv_memory = torch.full(shape, torch.nan, dtype=conv.dtype, device=conv.device)
        inputs = BlockInputs(
            conv=conv_memory.unfold(2, length, 1),
            key=empty(num_key_heads, key_size, dtype=conv.dtype),
            change=empty(num_value_heads, value_size, dtype=torch.float32),
            log_decay=empty(num_value_heads, dtype=torch.float32),
        )
        return cls(conv_memory, inputs)

    @classmethod
    def of(cls, pool: MambaPool) -> _Window:
        """What :func:`allocate_states` has put into a pool."""
        cache = pool.mamba_cache
        inputs = BlockInputs(
            conv=cache.intermediate_conv_window[0],
            key=cache.replayssm_rawk,
            change=cache.replayssm_rawv,
            log_decay=cache.replayssm_g,
        )
        return cls(pool._intermediate_conv_window_phys[0], inputs)

    @property
    def nbytes(self) -> int:
        rest = (self.inputs.key, self.inputs.change, self.inputs.log_decay)
        return self.conv_memory.nbytes + sum(tensor.nbytes for tensor in rest)


def window_bytes_per_request(cache_params, block_size: int) -> int:
    """Of one row of a :class:`_Window`; cache_params: of the target's config (`Mamba2CacheParams`)."""
    shape, dtype = cache_params.shape, cache_params.dtype
    num_value_heads, value_size, key_size = shape.temporal
    (channels, length), heads = shape.conv[0], shape.num_k_heads_per_tp
    per_layer = channels * (length + block_size - 1) * dtype.conv.itemsize
    per_layer += block_size * heads * key_size * dtype.conv.itemsize
    per_layer += block_size * num_value_heads * (value_size + 1) * torch.float32.itemsize
    return len(cache_params.layers) * per_layer


def allocate_states(original, pool: MambaPool, **kwargs) -> None:
    """AROUND `MambaPool.__init__`, which would keep the state after every verified token.

    The inputs take the places that SGLang has for another algorithm of its own, whose verification keeps them too
    (`replayssm_spec_fold`).
    """
    block_size = kwargs.get("speculative_num_draft_tokens")
    if block_size is None or get_spec().speculative_algorithm != "DFLASH":
        original(pool, **kwargs)
        return
    original(pool, **kwargs | {"speculative_num_draft_tokens": None})
    cache_params = kwargs["cache_params"]
    # As many rows as requests run, and one for padding.
    window = _Window.allocate(
        pool, kwargs["spec_state_size"] + 1, block_size, num_key_heads=cache_params.shape.num_k_heads_per_tp
    )
    states, inputs = pool.mamba_cache, window.inputs
    pool.mamba_cache = MambaPool.SpeculativeState(
        conv=states.conv,
        temporal=states.temporal,
        intermediate_ssm=None,
        intermediate_conv_window=[inputs.conv],
        replayssm_rawk=inputs.key,
        replayssm_rawv=inputs.change,
        replayssm_g=inputs.log_decay,
    )
    pool._intermediate_conv_window_phys = [window.conv_memory]
    pool.replayssm_spec_fold = True
    pool.mem_usage += window.nbytes / 2**30


def leave_memory_for_inputs(original, configurator: KVCacheConfigurator, total_rest_memory: float) -> float:
    """AROUND `KVCacheConfigurator._handle_max_mamba_cache`, in GiB: what it leaves to KV of `total_rest_memory`.

    It would reserve the state after every verified token.
    """
    if not configurator.spec_algorithm.is_dflash() or configurator.is_draft_worker:
        return original(configurator, total_rest_memory)
    algorithm = configurator.spec_algorithm
    # Without one, states are all that it counts.
    configurator.spec_algorithm = type(algorithm).NONE
    try:
        rest = original(configurator, total_rest_memory)
    finally:
        configurator.spec_algorithm = algorithm
    per_request = window_bytes_per_request(
        configurator.mambaish_config.mamba2_cache_params, get_spec().speculative_num_draft_tokens
    )
    slots_per_request = configurator._calculate_mamba_ratio()
    num_requests = min(get_schedule().max_running_requests, get_schedule().max_mamba_cache_size // slots_per_request)
    return rest - per_request * (num_requests + 1) / 2**30


def verify_and_keep_inputs(
    backend: GDNAttnBackend,
    *,
    layer: RadixLinearAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    layer_cache: MambaPool.SpeculativeState,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    retrieve_parent_token: None,
) -> torch.Tensor:
    """In place of `GDNAttnBackend._replayssm_fold_target_verify`: the delta rule of one layer over verified blocks.

    Args:
        query: [1, T, H, K], as key; value: [1, T, HV, V]; a, b: [T, HV].
        layer_cache: keeps the inputs of every token (`allocate_states`).
        ssm_states: [slots, HV, V, K], left alone.
        cache_indices: [n] int32, slots.
        query_start_loc: [n + 1], where each block begins, and T.

    Returns:
        [1, T, HV, V]
    """
    blocks = (len(query_start_loc) - 1, -1)
    output = ops.verify_block(
        *(x[0].unflatten(0, blocks) for x in (query, key, value)),
        *(x.unflatten(0, blocks) for x in (a, b)),
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
        states=ssm_states,
        slots=cache_indices,
        key_out=layer_cache.replayssm_rawk,
        change_out=layer_cache.replayssm_rawv,
        log_decay_out=layer_cache.replayssm_g,
    )
    return output.flatten(0, 1)[None]


def can_cache_finished_request(
    original, processor: SchedulerBatchResultProcessor, req: Req, result: GenerationBatchResult, i: int
) -> bool:
    """AROUND `SchedulerBatchResultProcessor._mamba_can_cache_finished_req`.

    Where a grammar ends inside a block, the tokens behind its end are dropped on the CPU only: the GPU has advanced the
    state by them. If they reach a multiple of the interval, it has also put the state there in the track slot, which
    the scheduler does not know. Of two slots that is not the one in which it looks; one alone may have held the state
    that it looks for.
    """
    track_slots, retained = req.kv.mamba_ping_pong_track_buffer, result.grammar_retained_tokens
    has_one = track_slots is not None and len(track_slots) == 1
    if has_one and get_spec().speculative_algorithm == "DFLASH" and retained is not None and retained[i] is not None:
        accepted = result.num_correct_drafts_per_req_cpu[i] + result.num_non_draft_tokens_per_req
        if len(retained[i]) < accepted:
            return False
    return original(processor, req, result, i)


class RecurrentState:
    """The states of a target's requests, advanced by what is accepted of each block."""

    def __init__(self, pool: HybridReqToTokenPool, interval: int) -> None:
        """
        Args:
            pool: which request has which slot.
            interval: tokens between two states that are kept for the prefix cache.
        """
        cache = pool.mamba_pool.mamba_cache
        self._pool, self._interval = pool, interval
        self._states = States(cache.conv[0], cache.temporal)
        self._window = _Window.of(pool.mamba_pool)
        # Both are written where requests get their slots.
        current = pool.req_index_to_mamba_index_mapping
        kept = pool.req_index_to_mamba_ping_pong_track_buffer_mapping if pool.enable_mamba_extra_buffer else None
        self._slots = StateSlots(current, kept, torch.zeros_like(current))
        self._always = torch.ones(1, dtype=torch.int64, device=current.device)

    @classmethod
    def of(cls, target_runner: ModelRunner, block_size: int) -> RecurrentState | None:
        """Of a target with its pools; None: it has no recurrent layers.

        Raises:
            ConfigError: with this block size, the states would not survive it.
        """
        pool = target_runner.req_to_token_pool
        if not isinstance(pool, HybridReqToTokenPool):
            return None
        dtype = pool.mamba_pool.mamba_cache.temporal.dtype
        if dtype != torch.float32:
            raise ConfigError(
                f"the recurrent states of the target would be kept in {dtype} (mamba_ssm_dtype in its config.json, or "
                "SGLANG_MAMBA_SSM_DTYPE), and rounded after every block, not after every token; set --mamba-ssm-dtype "
                "float32."
            )
        interval = mamba_track_grid(target_runner.page_size)
        # Under overlap scheduling two cycles are on their way, and only one of them may keep a state.
        if pool.enable_mamba_extra_buffer and interval < 2 * block_size:
            raise ConfigError(
                f"--mamba-track-interval {get_exec().mamba.mamba_track_interval}: a state is kept every {interval} "
                f"tokens, and two blocks of {block_size} may lie between two of them; set at least {2 * block_size}."
            )
        return cls(pool, interval)

    def describe(self) -> dict:
        """For `/server_info`."""
        pool = self._pool.mamba_pool
        states, num_rows = self._states, self._window.inputs.key.shape[1]
        return {
            "slots": pool.size,
            "bytes_per_slot": (states.conv.nbytes + states.temporal.nbytes) // (pool.size + 1),
            "verify_bytes_per_request": self._window.nbytes // num_rows,
            "running_requests": num_rows - 1,
            "track_interval": self._interval if self._pool.enable_mamba_extra_buffer else None,
        }

    def begin_prefill(self, batch: ScheduleBatch) -> None:
        """Learn which of a request's slots takes the next state that is kept for the prefix cache.

        They take turns with every boundary that is crossed, by SGLang's count as by ours, once for each: so its turn is
        known from then on, also while the scheduler has not seen the last cycle.
        """
        if self._slots.kept is None:
            return
        next_boundaries = [
            (prefix_len + extend_len) // self._interval + 1
            for prefix_len, extend_len in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        turns = [
            (req.kv.mamba_next_track_idx - boundary) % self._slots.kept.shape[1]
            for req, boundary in zip(batch.reqs, next_boundaries, strict=True)
        ]
        turn = self._slots.turn
        turn[batch.req_pool_indices] = async_h2d(turns, dtype=turn.dtype, device=turn.device)

    def commit(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        accept_lens: torch.Tensor,
        is_due: torch.Tensor | None = None,
    ) -> None:
        """Advance the states of requests whose blocks have been verified. Once for each cycle.

        Args:
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64, tokens before the block.
            accept_lens: [bs] int64.
            is_due: [1] int64; with 0 nothing is done.
        """
        ops.commit_state(
            states=self._states,
            inputs=self._window.inputs,
            slots=self._slots,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            accept_lens=accept_lens,
            interval=self._interval,
            is_due=self._always if is_due is None else is_due,
        )


def forget_prefill(batch: ScheduleBatch) -> None:
    """A batch that has been prefilled still says where its prefill kept states for the prefix cache; a cycle must not.

    What a worker changes of a batch, the scheduler changes back.
    """
    batch.mamba_track_indices = batch.mamba_track_mask = batch.mamba_track_seqlens = None
