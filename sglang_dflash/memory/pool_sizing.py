"""Pool sizing: what SGLang is told of captured layers, of the drafter's KV, and of the memory of decode cycles."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

import torch
from sglang.srt.configs.model_config import is_deepseek_v4
from sglang.srt.layers.vocab_parallel_embedding import pad_vocab_size
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import attention_backends, get_exec, get_parallel, get_schedule, get_spec

from sglang_dflash.attention.plan import INDEX_DTYPES
from sglang_dflash.checkpoint.draft_memory import DraftMemory
from sglang_dflash.draft import shortlist
from sglang_dflash.draft.runner import draft_model_config
from sglang_dflash.errors import ConfigError
from sglang_dflash.recurrent.pool import comparison_bytes_per_request
from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.server_args.pair import load_drafter_config
from sglang_dflash.server_args.trees import num_candidates
from sglang_dflash.verify import sampler

logger = logging.getLogger(__name__)

# Peak memory of SGLang's sampler, in multiples of the logits it gets: without seeds, and with them, where it sorts and
# computes in float64.
SAMPLER_COPIES = 7
SEEDED_SAMPLER_COPIES = 16


def resolve_target_capture(original, *, config, server_args, model_config, spec_algorithm, is_draft_worker) -> None:
    """AROUND `spec_aux_hidden_state._resolve_dflash_aux_hidden_state`: name the layers to capture and the drafter.

    SGLang makes room for that drafter's KV in the target's memory budget (`draft_kv_budget`).

    Args:
        config: `SpecAuxHiddenStateConfig` of the target's model runner, written.

    Raises:
        ConfigError: SGLang sizes the pools of this target without a drafter's KV.
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
    if is_deepseek_v4(model_config.hf_config):
        raise ConfigError(
            f"the target {model_config.model_path} keeps its KV in pools that DFLASH cannot share a memory budget with "
            "(DSV4PoolConfigurator)."
        )
    drafter = load_drafter_config(server_args)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = drafter.captured_layers(model_config.hf_config.model_type)
    config.draft_model_config = draft_model_config(server_args, model_config.context_len, model_config.dtype)
    config.draft_kv_num_layers = config.dflash_draft_num_layers = len(drafter.layers)


@dataclass(frozen=True)
class CycleMemory:
    """Memory of decode cycles that is not in the pools, on one rank, in bytes.

    It is that of the largest CUDA graph, in whose memory the other graphs are, and of a cycle without a graph if more
    requests may run than the largest graph has. A server that only prefills has none but `context`.

    Attributes:
        logits: the target's logits of all verified tokens (see `logit_bytes`).
        draft_logits: the drafter's logits of a block's draft tokens, in this rank's shard of the vocabulary, or what a
            shortlist keeps of them.
        table, pairs, convolutions: see :class:`sglang_dflash.checkpoint.draft_memory.DraftMemory`.
        sampler: peak of SGLang's sampler for the requests that need it.
        comparisons: matrices that compare the nodes of a request in a recurrent layer.
        indices: the attention backends' lists of the KV that the graphs' blocks see.
        context: copies of the drafter's k and v projections of all layers.
    """

    logits: int
    draft_logits: int
    table: int
    pairs: int
    convolutions: int
    sampler: int
    comparisons: int
    indices: int
    context: int

    @classmethod
    def of(cls, configurator: KVCacheConfigurator) -> CycleMemory:
        """Return the memory of the server that the target's pools are configured for."""
        model_config, block_size = configurator.model_config, get_spec().speculative_num_draft_tokens
        running = get_schedule().max_running_requests if runs_cycles() else 0
        decode = get_exec().graph.cuda_graph_config.decode
        # SGLang captures no graph for more requests than may run.
        captured = 0 if decode.backend == Backend.DISABLED else min(decode.max_bs, running)
        requests = captured + (running if running > captured else 0)
        per_request = sampler.sampler_bytes(model_config.vocab_size, block_size)
        at_a_time = min(running * per_request, max(sampler.SAMPLER_BYTES, per_request))
        is_seeded = get_exec().deterministic.enable_deterministic_inference
        backends = (attention_backends()[1], get_spec().speculative_draft_attention_backend)
        # A target with windows has a list for its sliding layers and one for the others.
        index_bytes = sum(INDEX_DTYPES[backend].itemsize for backend in backends if backend in INDEX_DTYPES)
        index_bytes *= 1 + configurator.is_hybrid_swa
        capture = configurator.spec_aux_config
        drafter, itemsize = capture.draft_model_config, configurator.model_dtype.itemsize
        of_drafts = asdict(_draft_memory(configurator))
        num_projected = 2 * drafter.get_num_kv_heads(get_parallel().tp_size) * drafter.head_dim
        return cls(
            logits=requests * block_size * model_config.vocab_size * logit_bytes(configurator),
            draft_logits=requests * _draft_logit_bytes(configurator),
            **{name: requests * num_bytes for name, num_bytes in of_drafts.items()},
            sampler=at_a_time * (SEEDED_SAMPLER_COPIES if is_seeded else SAMPLER_COPIES),
            comparisons=requests * _comparison_bytes(configurator),
            indices=captured * model_config.context_len * index_bytes,
            context=capture.draft_kv_num_layers * num_projected * drafter.hidden_size * itemsize,
        )

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{num_bytes / 2**20:.0f} MiB for {name}" for name, num_bytes in asdict(self).items())
        return f"Memory of decode cycles, on top of what --mem-fraction-static leaves: {parts}."


def logit_bytes(configurator: KVCacheConfigurator) -> int:
    """Return the peak bytes of one logit of the target.

    A logit is in the lm_head's dtype. With tensor parallelism it is gathered in the order of the ranks and copied to
    that of the vocabulary. A soft cap adds a copy in float32.
    """
    config = configurator.model_config.hf_text_config.to_dict()
    is_float32 = get_exec().features.enable_fp32_lm_head or config.get("enable_lm_head_fp32", False)
    itemsize = torch.float32.itemsize if is_float32 else configurator.model_dtype.itemsize
    num_bytes = itemsize if get_parallel().tp_size == 1 else 2 * itemsize
    return num_bytes + torch.float32.itemsize * bool(config.get("final_logit_softcapping"))


def _draft_logit_bytes(configurator: KVCacheConfigurator) -> int:
    """Return the bytes of the drafter's logits of one request, or of what a shortlist keeps of them."""
    drafter = load_drafter_config(configurator.server_args)
    vocab_size = drafter.draft_vocab_size or configurator.model_config.vocab_size
    columns = pad_vocab_size(vocab_size) // get_parallel().tp_size
    row = columns * configurator.model_dtype.itemsize
    if shortlist.is_used():
        k = drafter.num_candidates(num_candidates(configurator.server_args))
        row = shortlist.row_bytes(columns, drafter.hidden_size, k)
    return (get_spec().speculative_dflash_block_size - 1) * row


def _comparison_bytes(configurator: KVCacheConfigurator) -> int:
    """Return the bytes of the matrices that compare the nodes of one request; 0 without recurrent layers."""
    recurrent = configurator.mambaish_config
    if recurrent is None:
        return 0
    return comparison_bytes_per_request(recurrent.mamba2_cache_params, get_spec().speculative_num_draft_tokens)


def _draft_memory(configurator: KVCacheConfigurator) -> DraftMemory:
    """Return the memory of the table of one request's drafts, and of the drafter's optional parts."""
    return DraftMemory.of(
        load_drafter_config(configurator.server_args),
        get_spec().speculative_dflash_block_size,
        num_candidates(configurator.server_args),
        configurator.model_dtype.itemsize,
        get_parallel().tp_size,
    )


def leave_memory_for_cycles(
    original, configurator: KVCacheConfigurator, budget_bytes: int, *, cap_tokens: int | None = None
) -> MemoryPoolConfig:
    """AROUND `KVCacheConfigurator.config_from_budget`: subtract the memory of decode cycles from that of the pools.

    SGLang leaves memory for servers that choose one token per request at a time.
    """
    if configurator.spec_algorithm.is_dflash() and not configurator.is_draft_worker:
        memory = CycleMemory.of(configurator)
        logger.info("%s", memory)
        budget_bytes -= memory.total
    return original(configurator, budget_bytes, cap_tokens=cap_tokens)


@dataclass(frozen=True)
class KVMemory:
    """KV memory of a token in the allocated pools, for the log and `/server_info`.

    Attributes:
        capacity: tokens that the target's full-attention layers have room for, before CUDA graphs take memory.
        target_bytes_per_token: of one rank. For a windowed target it includes the share of the sliding layers' pool.
        drafter_bytes_per_token: of one rank.
        drafter_dtype: of the drafter's keys and values.
    """

    capacity: int
    target_bytes_per_token: float
    drafter_bytes_per_token: float
    drafter_dtype: torch.dtype

    @classmethod
    def measure(cls, target: KVCache, drafter: KVCache) -> KVMemory:
        return cls(drafter.size, _bytes_per_token(target), _bytes_per_token(drafter), drafter.dtype)

    def __str__(self) -> str:
        return (
            f"KV memory per token: {self.target_bytes_per_token:.0f} bytes of the target, "
            f"{self.drafter_bytes_per_token:.0f} bytes of the drafter ({self.drafter_dtype}); "
            f"room for {self.capacity} tokens."
        )


def _bytes_per_token(pool: KVCache) -> float:
    sizes = pool.get_kv_size_bytes()
    # MLA pools return one size, of the latents. Other pools return those of keys and values.
    num_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
    # Pools have one page more than they give out, for writes of padding. SGLang's sizes are NumPy numbers, which JSON
    # does not have.
    return float(num_bytes / (pool.size + pool.page_size))
