"""Memory of recurrent states: the bytes that SGLang is told equal the bytes that its pool takes."""

from types import SimpleNamespace

import pytest
import torch
from bench.pairs import checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule
from support import hybrid
from test_memory import configurator, kv_dtype, served, server_args

from sglang_dflash.errors import ConfigError
from sglang_dflash.recurrent.state import RecurrentState

BUDGET = 64 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    target = hybrid.write_config(folder / "target", "Qwen3_5ForCausalLM")
    return target, hybrid.write_drafter(folder / "drafter")


def allocate(args, target, num_requests):
    """Return the pools of a server with `BUDGET` bytes for states and KV, and the bytes left for KV."""
    with served(args):
        kvc = configurator(args, ModelConfig(str(target), dtype="float32"), kv_dtype(is_draft_worker=False))
        left = kvc._handle_max_mamba_cache(BUDGET / 2**30) * 2**30
        config = MemoryPoolConfig(max_total_num_tokens=1000, max_running_requests=num_requests)
        sizes = kvc._derive_pool_sizes(config=config)
        return kvc._init_pools(sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None), left


@pytest.fixture(autouse=True)
def conv_dtype(monkeypatch):
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")


@pytest.mark.parametrize("slots", [None, 30])
def test_states_and_inputs_take_what_is_counted(pair, slots):
    args = server_args(*pair, max_running_requests=6, max_mamba_cache_size=slots)
    args.resolve_once()
    pools, left = allocate(args, pair[0], num_requests=6)

    with served(args):
        states = RecurrentState.of(SimpleNamespace(req_to_token_pool=pools.req_to_token_pool, page_size=1), 16)
    described = states.describe()
    taken = described["bytes_per_slot"] * (described["slots"] + 1)
    taken += described["verify_bytes_per_request"] * (described["running_requests"] + 1)
    assert described["running_requests"] == 6
    assert slots is None or described["slots"] == slots
    assert BUDGET - left == pytest.approx(taken, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "gib", "flags", "wanted"),
    [
        ("qwen3.5-27b", 16.0, {}, {"requests": (10, 1)}),
        ("qwen3.5-9b", 50.0, {}, {"requests": (48, 22)}),
        ("qwen3.5-9b", 50.0, {"max_mamba_cache_size": 240}, {"requests": (48, 48), "gib": (37.7, 0.8)}),
    ],
)
def test_an_80_gb_card(tmp_path, monkeypatch, name, gib, flags, wanted):
    """The requests that run with bf16 weights, and the GiB left for KV: with this package's hook and without it.

    Without it, SGLang reserves the states after every verified token. `gib` is 0.88 of the card minus the weights.
    """
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    target, drafter = (checkpoint(model, tmp_path) for model in (name, f"{name}-dflash"))
    requests, left = [], []
    for handle in (
        KVCacheConfigurator._handle_max_mamba_cache,
        KVCacheConfigurator._handle_max_mamba_cache.__wrapped__,
    ):
        args = server_args(target, drafter, dtype="bfloat16", max_running_requests=48, **flags)
        args.resolve_once()
        with served(args):
            kvc = configurator(args, ModelConfig(target, dtype="bfloat16"), torch.bfloat16)
            left.append(handle(kvc, gib))
            slots = get_schedule().max_mamba_cache_size
            requests.append(min(slots // kvc._calculate_mamba_ratio(), get_schedule().max_running_requests))

    assert tuple(requests) == wanted["requests"]
    if "gib" in wanted:
        assert left == pytest.approx(wanted["gib"], abs=0.1)


def test_blocks_that_are_longer_than_half_an_interval(pair):
    args = server_args(*pair, max_running_requests=2, max_mamba_cache_size=30, mamba_track_interval=64)
    args.resolve_once()
    pools, _ = allocate(args, pair[0], num_requests=2)
    runner = SimpleNamespace(req_to_token_pool=pools.req_to_token_pool, page_size=1)

    with served(args):
        assert RecurrentState.of(runner, 32).describe()["track_interval"] == 64
        with pytest.raises(ConfigError, match=r"^--mamba-track-interval 64: .* set at least 66"):
            RecurrentState.of(runner, 33)


def test_a_target_without_recurrent_layers():
    assert RecurrentState.of(SimpleNamespace(req_to_token_pool=torch.empty(0)), 16) is None


def test_slots_that_are_given_away_after_a_cycle(pair):
    """A decision of SGLang's sampler after the graph is written to the slots that the requests had before."""
    args = server_args(*pair, max_running_requests=2, max_mamba_cache_size=30)
    args.resolve_once()
    pools, _ = allocate(args, pair[0], num_requests=2)
    pool = pools.req_to_token_pool
    with served(args):
        states = RecurrentState.of(SimpleNamespace(req_to_token_pool=pool, page_size=1), 16)
    cache, rows = pool.mamba_pool.mamba_cache, torch.tensor([1, 2])
    for tensor in (cache.intermediate_conv_window[0], cache.replayssm_rawk, cache.replayssm_rawv, cache.replayssm_g):
        tensor.fill_(0.5)
    mapping = pool.req_index_to_mamba_index_mapping
    mapping[rows] = torch.tensor([3, 4], dtype=mapping.dtype)
    before = cache.temporal.clone()

    batch = SimpleNamespace(req_pool_indices=rows, seq_lens=torch.tensor([8, 9]))
    commit = states.plan_commit(batch, has_fallback=True, is_overlapped=True)
    mapping[rows] = torch.tensor([5, 6], dtype=mapping.dtype)
    paths = torch.arange(16).expand(2, -1)
    commit.accept(torch.tensor([2, 1]), paths)

    changed = (cache.temporal != before).flatten(2).any(dim=2).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [3, 4]
