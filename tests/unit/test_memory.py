"""Memory of the drafter's KV: the bytes that are counted equal the bytes that SGLang's pools take."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import create_context, get_exec, use_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.windowed import WINDOW, write_windowed_pair

from models import hybrid
from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.draft import shortlist
from sglang_dflash.errors import ConfigError
from sglang_dflash.memory.limits import check_pool, check_window_pool
from sglang_dflash.memory.pool_sizing import CycleMemory, KVMemory, logit_bytes
from sglang_dflash.server_args.pair import load_drafter_config

load_plugins()

if torch.cuda.is_available():
    pytest.skip("builds its pools on the CPU", allow_module_level=True)

BUDGET = 8 << 20
DTYPE = torch.float32
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


def server_args(target: Path, drafter: Path, **changes) -> ServerArgs:
    return ServerArgs(
        model_path=str(target),
        device="cpu",
        attention_backend="torch_native",
        speculative_draft_model_path=str(drafter),
        **({"speculative_algorithm": "DFLASH", "page_size": 1, "dtype": "float32"} | changes),
    )


def drafter_with(folder: Path, **fields) -> Path:
    folder.mkdir()
    config = json.loads((DRAFTER_DIR / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def configurator(
    args: ServerArgs, model: ModelConfig, kv_dtype: torch.dtype, drafter_of: SimpleNamespace | None = None
) -> KVCacheConfigurator:
    """Return SGLang's configurator for a target, or for a drafter next to a target's pools."""
    of = drafter_of or SimpleNamespace(config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None)
    num_layers, is_draft_worker = model.num_hidden_layers, drafter_of is not None
    layer_info = ModelLayerInfo(
        start_layer=0,
        end_layer=num_layers,
        num_effective_layers=num_layers,
        swa_attention_layer_ids=model.swa_attention_layer_ids if model.is_hybrid_swa else None,
        full_attention_layer_ids=model.full_attention_layer_ids if model.is_hybrid_swa else None,
    )
    spec_aux_config = resolve_spec_aux_hidden_state_config(
        server_args=args,
        model_config=model,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        is_draft_worker=is_draft_worker,
    )
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model,
        server_args=args,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str="auto",
        model_dtype=DTYPE,
        page_size=args.page_size,
        sliding_window_size=WINDOW - 1 if model.is_hybrid_swa else None,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        is_draft_worker=is_draft_worker,
        post_capture_kv_active=False,
        spec_aux_config=spec_aux_config,
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=model.is_hybrid_swa_compress,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=layer_info,
        forward_stream=None,
        req_to_token_pool=of.req_to_token_pool,
        token_to_kv_pool_allocator=of.token_to_kv_pool_allocator,
        memory_pool_config=of.config,
    )


def kv_dtype(is_draft_worker: bool) -> torch.dtype:
    """Return the KV dtype as a `ModelRunner` chooses it."""
    runner = SimpleNamespace(
        dtype=DTYPE,
        is_draft_worker=is_draft_worker,
        draft_attention_backend="torch_native",
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
    )
    ModelRunner.configure_kv_cache_dtype(runner)
    return runner.kv_cache_dtype


def served(args: ServerArgs):
    """Return a context in which SGLang's configuration is that of a server with these arguments."""
    return use_context(create_context(args, role="scheduler"))


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        # One block per request of the largest graph, whatever else is captured.
        ({}, 8 * 16),
        ({"speculative_adaptive": True}, 8 * 16),
        # Requests beyond all graphs have their logits in addition.
        ({"max_running_requests": 9}, (8 + 9) * 16),
        ({"max_running_requests": 6}, 6 * 16),
    ],
)
def test_graphs_share_the_memory_of_logits(flags, rows):
    args = server_args(TARGET_DIR, DRAFTER_DIR, **({"max_running_requests": 8} | flags))
    model = ModelConfig.from_server_args(args)
    with served(args):
        decode = get_exec().graph.cuda_graph_config.decode
        decode.backend, decode.max_bs = "full", 8
        memory = CycleMemory.of(configurator(args, model, DTYPE))

    assert memory.logits == rows * model.vocab_size * DTYPE.itemsize
    # All tokens of a block but the bonus token.
    assert memory.draft_logits == rows // 16 * 15 * model.vocab_size * DTYPE.itemsize
    # 16 candidates with tokens and logits, and a table of log probabilities and numbers of candidates.
    assert memory.table == rows // 16 * 15 * 16 * (16 * (4 + 1) + 8 + 4)
    assert memory.pairs == memory.convolutions == 0
    # 3 layers, 2 KV heads of 64, and a hidden size of 256.
    assert memory.context == 3 * 2 * 2 * 64 * 256 * DTYPE.itemsize


@pytest.mark.parametrize(
    ("fields", "flags", "numbers"),
    [
        ({}, {}, 15 * 1024),
        # A shard of the vocabulary, padded to whole groups of 64 tokens.
        ({}, {"tp_size": 2}, 15 * 512),
        ({"draft_vocab_size": 500}, {}, 15 * 512),
        ({}, {"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 8}, 7 * 1024),
    ],
)
def test_drafts_have_logits(tmp_path, monkeypatch, fields, flags, numbers):
    """They are in the budget, or what a shortlist keeps to find the best tokens without them."""
    args = server_args(TARGET_DIR, drafter_with(tmp_path / "drafter", **fields), max_running_requests=8, **flags)
    model = ModelConfig.from_server_args(args)
    with served(args):
        kvc = configurator(args, model, DTYPE)
        memory = CycleMemory.of(kvc)
        assert memory.draft_logits == 8 * numbers * DTYPE.itemsize
        assert memory.total > memory.draft_logits + memory.logits
        monkeypatch.setattr(shortlist, "_shortlists", {object()})
        of_shortlist = CycleMemory.of(kvc).draft_logits
    # The best column and a sum of each group of 64, 256 numbers in int8 with their scale, and 64 candidates.
    columns = 512 if numbers % 1024 else 1024
    assert of_shortlist == 8 * numbers // columns * (columns // 64 * 8 + 256 + 4 + 64 * 12)


@pytest.mark.parametrize(
    ("flags", "num_drafts", "shares"),
    [
        ({}, 15, 1),
        # Factors are gathered from the ranks, and then put in order.
        ({"tp_size": 2}, 15, 3),
        # The number of candidates is the checkpoint's.
        ({"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 20}, 15, 1),
        ({"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 8}, 7, 1),
    ],
)
def test_parts_are_in_the_budget(tmp_path, monkeypatch, flags, num_drafts, shares):
    config = json.loads((DRAFTER_DIR / "config.json").read_text())["dflash_config"]
    config |= {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    drafter = drafter_with(tmp_path / "drafter", dflash_config=config)
    args = server_args(TARGET_DIR, drafter, max_running_requests=8, **flags)
    model = ModelConfig.from_server_args(args)
    with served(args):
        memory = CycleMemory.of(configurator(args, model, DTYPE))
        monkeypatch.setattr(shortlist, "_shortlists", {object()})
        of_shortlist = CycleMemory.of(configurator(args, model, DTYPE)).draft_logits
    assert memory.table == 8 * num_drafts * 5 * (5 * (4 + 1) + 8 + 4)
    # See `test_drafts_have_logits`. 5 drafts are chosen from 32.
    assert of_shortlist == 8 * num_drafts * (1024 // args.tp_size // 64 * 8 + 256 + 4 + 32 * 12)
    assert memory.pairs == 8 * num_drafts * 6 * DTYPE.itemsize * shares
    # Two weights for each tap and group of channels, and the convolved row.
    assert memory.convolutions == 8 * (num_drafts + 1) * (2 * 3 * 256 // 4 + 256) * DTYPE.itemsize


@pytest.mark.parametrize(("nodes", "width"), [(16, 16), (20, 32), (64, 64)])
def test_comparisons_of_nodes_are_in_the_budget(nodes, width):
    flags = {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": nodes, "max_running_requests": 8}
    args = server_args(hybrid.TARGET_DIR, hybrid.DRAFTER_DIR, **flags)
    with envs.SGLANG_MAMBA_CONV_DTYPE.override("float32"):
        model = ModelConfig.from_server_args(args)
        heads = model.hf_text_config.linear_num_value_heads
        with served(args):
            memory = CycleMemory.of(configurator(args, model, DTYPE))
    # Two matrices and three factors, in float32.
    assert memory.comparisons == 8 * heads * (2 * width * width + 3 * width) * 4


def test_a_prefill_server_has_no_memory_for_cycles():
    args = server_args(TARGET_DIR, DRAFTER_DIR, disaggregation_mode="prefill", max_running_requests=8)
    model = ModelConfig.from_server_args(args)
    with served(args):
        memory = CycleMemory.of(configurator(args, model, DTYPE))
    # Prompts are projected too.
    assert memory.context > 0 and memory.total == memory.context


@pytest.mark.parametrize("name", ["DFLASH", "dflash", "DFlash"])
def test_rows_have_room_for_blocks(name):
    """There is room for two blocks past the committed tokens, and a page, in any spelling of the algorithm."""
    args = server_args(TARGET_DIR, DRAFTER_DIR, speculative_algorithm=name)
    with served(args):
        assert (
            allocation_sizing.get_req_to_token_extra_context_len()
            >= allocation_sizing.get_alloc_reserve_per_decode() + 1
            == 33
        )
    with served(ServerArgs(model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native", page_size=1)):
        assert allocation_sizing.get_req_to_token_extra_context_len() == 4


@pytest.mark.parametrize(
    ("arguments", "softcap", "num_bytes"),
    [({}, None, 2), ({"enable_fp32_lm_head": True}, None, 4), ({}, 30.0, 6), ({"tp_size": 2}, None, 4)],
)
def test_bytes_of_a_logit(arguments, softcap, num_bytes):
    """Capped logits need a float32 copy in addition. Logits of several ranks need a second copy, put in order."""
    args = server_args(TARGET_DIR, DRAFTER_DIR, **arguments)
    config = ModelConfig(str(TARGET_DIR), dtype="bfloat16")
    config.hf_text_config.final_logit_softcapping = softcap
    with served(args):
        of_target = configurator(args, config, torch.bfloat16)
        of_target.model_dtype = torch.bfloat16
        assert logit_bytes(of_target) == num_bytes


def allocate(args: ServerArgs, target: Path) -> tuple[MemoryPoolConfig, list]:
    """Return the pool config and both pools of a server with `BUDGET` bytes for KV, besides the cycles' memory."""
    with served(args):
        kvc = configurator(args, ModelConfig(str(target), dtype="float32"), kv_dtype(is_draft_worker=False))
        config = kvc.config_from_budget(BUDGET + CycleMemory.of(kvc).total)
        config.max_running_requests = 4
        pools = kvc._init_pools(
            sizes=kvc._derive_pool_sizes(config=config), req_to_token_pool=None, token_to_kv_pool_allocator=None
        )
        beside = SimpleNamespace(
            config=config,
            req_to_token_pool=pools.req_to_token_pool,
            token_to_kv_pool_allocator=pools.token_to_kv_pool_allocator,
        )
        drafter = ModelConfig(args.speculative_draft_model_path, dtype="float32", is_draft_model=True)
        dtype = kv_dtype(is_draft_worker=True)
        result = configurator(args, drafter, dtype, beside).configure(pre_model_load_memory=0)
    return config, [pools.token_to_kv_pool, result.token_to_kv_pool]


def check(args: ServerArgs, target: Path, drafter_bytes: int, dtype: torch.dtype = DTYPE) -> None:
    """Check that the drafter's slots take the bytes that were counted, and that both pools just fill the budget."""
    config, (target_pool, drafter_pool) = allocate(args, target)
    drafter = load_drafter_config(args)
    assert drafter.kv_bytes_per_token(dtype.itemsize) == drafter_bytes

    memory = KVMemory.measure(target_pool, drafter_pool)

    assert memory.drafter_bytes_per_token == drafter_bytes
    assert memory.drafter_dtype == dtype
    assert memory.capacity == drafter_pool.size == config.max_total_num_tokens
    # Each pool has one page more for itself, which is not in the budget.
    per_token = memory.target_bytes_per_token + drafter_bytes
    spare = BUDGET - per_token * config.max_total_num_tokens
    assert -per_token * args.page_size < spare < per_token * 2 * args.page_size
    assert f"{drafter_bytes} bytes of the drafter ({dtype})" in str(memory)
    assert f"room for {config.max_total_num_tokens} tokens" in str(memory)


GEOMETRIES = [
    ({}, 3 * 2 * 2 * 64 * 4),
    ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, 3 * 2 * 3 * 16 * 4),
    ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}, 3 * 2 * 8 * 128 * 4),
    ({"num_hidden_layers": 1, "num_key_value_heads": 1, "layer_types": ["full_attention"]}, 1 * 2 * 1 * 64 * 4),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("fields", "drafter_bytes"), GEOMETRIES)
def test_drafters_of_a_dense_target(tmp_path, fields, drafter_bytes, page_size):
    drafter = drafter_with(tmp_path / "drafter", **fields)
    check(server_args(TARGET_DIR, drafter, page_size=page_size), TARGET_DIR, drafter_bytes)


@pytest.mark.parametrize("flag", ["kv_cache_dtype", "speculative_draft_kv_cache_dtype"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_dtype(flag, page_size):
    args = server_args(TARGET_DIR, DRAFTER_DIR, page_size=page_size, **{flag: "bf16"})
    check(args, TARGET_DIR, 3 * 2 * 2 * 64 * 2, torch.bfloat16)


def test_latent_attention(tmp_path):
    """Only the drafter is read from the server's arguments, because the target's class cannot run here."""
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    check(server_args(TARGET_DIR, DRAFTER_DIR), tmp_path, 3 * 2 * 2 * 64 * 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 16},
        # With these flags SGLang sizes the sliding layers' pool by requests, and the other pool by what is left.
        {"disable_radix_cache": True, "chunked_prefill_size": 64, "max_running_requests": 1},
    ],
)
@pytest.mark.parametrize(("flag", "dtype"), [("auto", DTYPE), ("bf16", torch.bfloat16)])
def test_windowed_target(tmp_path, changes, flag, dtype):
    target, drafter = write_windowed_pair(tmp_path)
    args = server_args(target, drafter, kv_cache_dtype=flag, **changes)
    check(args, target, 2 * 2 * 3 * 128 * dtype.itemsize, dtype)


def test_heads_are_spread_over_ranks_or_replicated():
    config = load_drafter_config(server_args(TARGET_DIR, DRAFTER_DIR))
    per_rank = [config.kv_bytes_per_token(torch.bfloat16.itemsize, tp_size) for tp_size in (1, 2, 4)]
    assert per_rank == [3 * 2 * heads * 64 * 2 for heads in (2, 1, 1)]


def test_pool_of_sliding_layers_that_is_too_small_for_a_request(tmp_path):
    target, drafter = write_windowed_pair(tmp_path)
    needed = 47 + envs.SGLANG_SWA_EVICTION_INTERVAL.get() + 2 * 8 + 2
    with served(server_args(target, drafter)):
        check_window_pool(MemoryPoolConfig(5000, swa_max_total_num_tokens=needed), 47, page_size=1)
        with pytest.raises(ConfigError) as caught:
            check_window_pool(MemoryPoolConfig(5000, swa_max_total_num_tokens=needed - 1), 47, page_size=1)
    assert f"room for {needed - 1} tokens" in str(caught.value) and "--swa-full-tokens-ratio" in str(caught.value)


def test_pool_that_is_too_small_for_a_decode_step():
    reserved = 2 * 16
    with served(server_args(TARGET_DIR, DRAFTER_DIR)):
        check_pool(MemoryPoolConfig(reserved + 2), page_size=1)
        with pytest.raises(
            ConfigError, match=f"room for {reserved + 1} tokens, .* reserves {reserved + 1}; raise --max"
        ):
            check_pool(MemoryPoolConfig(reserved + 1), page_size=1)


def test_target_without_full_layers():
    with pytest.raises(ConfigError, match="sliding-window layers only"):
        check_window_pool(MemoryPoolConfig(5000, full_max_total_num_tokens=0, swa_max_total_num_tokens=5000), 47, 1)
