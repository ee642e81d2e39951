"""Choice of this package's attention for chains in place of FlashInfer's, and its results."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import nn

from sglang_dflash.attention import plan
from sglang_dflash.attention.trees import ChainAttentionBackend
from sglang_dflash.ops.kernels.attend_trees import SHARED_MEMORY


class Pool(MHATokenToKVPool):
    """A pool of another class."""

    def __init__(self) -> None:
        pass


def mha_pool(layout: str = "nhd") -> MHATokenToKVPool:
    pool = object.__new__(MHATokenToKVPool)
    pool.kv_cache_layout, pool.quant_method = layout, object.__new__(UnquantizedKVCacheMethod)
    return pool


def target(pool=None, is_deterministic: bool = False, **layer) -> SimpleNamespace:
    """Return a model runner."""
    return SimpleNamespace(
        model=nn.ModuleDict({"attn": RadixAttention(2, 8, 1.0, 1, 0, **layer)}),
        attn_backend=SimpleNamespace(enable_deterministic=is_deterministic),
        token_to_kv_pool=pool or mha_pool(),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, 8, dtype=torch.int32)),
        kv_index_translator=None,
        gpu_id=0,
    )


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to have FlashInfer and a Hopper GPU."""
    properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY)
    flashinfer_plan = SimpleNamespace(FlashInferPlan=SimpleNamespace(supports=lambda backend: True))
    monkeypatch.setattr(plan, "_is_flashinfer", lambda backend: True)
    monkeypatch.setattr(plan, "log_info_on_rank0", lambda logger, message: logger.info(message))
    monkeypatch.setitem(sys.modules, "sglang_dflash.attention.flashinfer_plan", flashinfer_plan)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def test_every_node_sees_those_before_it(gpu):
    attention = plan.chain_attention(target(), 16)
    attention.init_cuda_graph_state(3, 3 * 64)
    attention.init_cuda_graph_state(3, 3 * 4)

    def ancestors(width: int) -> list[list[int]]:
        batch = SimpleNamespace(batch_size=2, spec_info=SimpleNamespace(draft_token_num=width))
        return attention._ancestors(batch).tolist()

    assert isinstance(attention, ChainAttentionBackend)
    assert ancestors(4) == [[1, 3, 7, 15]] * 2
    assert ancestors(64) == [[2 ** (i + 1) - 1 for i in range(63)] + [-1]] * 2


@pytest.mark.parametrize(
    ("runner", "block_size", "reason"),
    [
        (target(use_irope=True), 16, "layer attn of the target attends in chunks"),
        (target(pool=Pool()), 16, "the target's KV is in a Pool"),
        (target(pool=object.__new__(MLATokenToKVPool)), 16, "the target's KV is in a MLATokenToKVPool"),
        (target(pool=mha_pool("hnd")), 16, "the target's KV is laid out as hnd"),
        (target(), 65, "blocks have more than 64 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flashinfer_keeps_others_and_says_why(runner, block_size, reason, gpu, caplog):
    with caplog.at_level(logging.INFO):
        assert plan.chain_attention(runner, block_size) is None
    assert reason in caplog.text


def test_flashinfer_keeps_chains_on_other_gpus(gpu, caplog):
    gpu.shared_memory_per_block_optin -= 1
    with caplog.at_level(logging.INFO):
        assert plan.chain_attention(target(), 16) is None
    assert "shared memory" in caplog.text


def test_rounding_that_depends_on_other_requests_is_not_deterministic(gpu):
    assert plan.chain_attention(target(is_deterministic=True), 16) is None


def test_other_backends_verify_chains_themselves():
    assert plan.chain_attention(target(), 16) is None
