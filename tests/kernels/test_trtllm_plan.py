"""Chains on TRT-LLM's backends: SGLang's own kernels lay them out, on the GPU alone, and a graph can record them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import trtllm_mha_backend, trtllm_mla_backend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.attention import plan

BLOCK_SIZE, PAGE_SIZE, CONTEXT, POOL_ROWS, BS = 16, 64, 640, 4, 3
# Of a row of `req_to_token`: the last block of a request ends after the context.
WIDTH = CONTEXT + PAGE_SIZE


class Translator:
    is_translating = False

    def bind_runner_slots(self, batch) -> None:
        pass


def backend_of(module, name: str, device: str, **attributes):
    """One of SGLang's backends with what its layout reads, without kernels of a GPU."""
    backend = object.__new__(getattr(module, name))
    pages = torch.arange(POOL_ROWS * (WIDTH // PAGE_SIZE), device=device).view(POOL_ROWS, -1)
    slots = (pages[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten(1)
    common = {
        "req_to_token": slots.int(),
        "page_size": PAGE_SIZE,
        "device": device,
        "max_context_len": CONTEXT,
        "kv_index_translator": Translator(),
    }
    for attribute, value in (common | attributes).items():
        setattr(backend, attribute, value)
    return backend


@pytest.fixture
def trtllm_mha(device):
    return backend_of(
        trtllm_mha_backend,
        "TRTLLMHAAttnBackend",
        device,
        max_num_pages=CONTEXT // PAGE_SIZE,
        speculative_num_draft_tokens=BLOCK_SIZE,
        use_sliding_window_kv_pool=False,
        expand_encoder_only_verify=False,
        _swa_kv_pool=None,
        _swa_full_to_swa_mapping=None,
    )


@pytest.fixture
def trtllm_mla(device, monkeypatch):
    parallel = SimpleNamespace(dcp_enabled=False)
    monkeypatch.setattr(trtllm_mla_backend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(trtllm_mla_backend.FlashInferMLAAttnBackend, "init_cuda_graph_state", lambda *args: None)
    return backend_of(
        trtllm_mla_backend,
        "TRTLLMMLABackend",
        device,
        num_draft_tokens=BLOCK_SIZE,
        data_type=torch.bfloat16,
        num_q_heads=2,
        kv_cache_dim=576,
        is_draft_runner=True,
        skip_prefill=False,
        decode_cuda_graph_metadata={},
    )


@pytest.fixture(autouse=True)
def without_flashattention(monkeypatch):
    """Its module needs SGLang's kernels of a GPU."""
    module = SimpleNamespace(FlashAttentionBackend=type("FlashAttentionBackend", (), {}))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.flashattention_backend", module)


def batch_of(seq_lens: list[int], device: str) -> SimpleNamespace:
    return SimpleNamespace(
        batch_size=BS,
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=SimpleNamespace(ragged_verify_layout=None),
        kv_loc_plan=None,
        seq_lens=torch.tensor(seq_lens, device=device),
        req_pool_indices=torch.tensor([2, 0, 3], device=device),
        out_cache_loc=torch.zeros(BS * BLOCK_SIZE, dtype=torch.int64, device=device),
        positions=torch.zeros(BS * BLOCK_SIZE, dtype=torch.int64, device=device),
    )


# The first block begins in the last tokens of the context.
SEQ_LENS = [CONTEXT - 1, 1, PAGE_SIZE]


def test_trtllm_mha_is_laid_out_inside_the_graph(trtllm_mha, device):
    block_plan = plan.block_plan(trtllm_mha, BLOCK_SIZE)
    assert type(block_plan) is plan.PagedPlan and not block_plan.needs_host_lens
    trtllm_mha.init_cuda_graph_state(BS, BS * BLOCK_SIZE)
    batch = batch_of([1] * BS, device)
    block_plan.capture(batch)
    # As SGLang's runner and the cycle record it, and as a replay finds other lengths.
    batch.seq_lens.copy_(torch.tensor(SEQ_LENS))
    trtllm_mha.init_forward_metadata_in_graph(batch)
    block_plan.record(batch)

    metadata = trtllm_mha.forward_metadata
    assert metadata.max_seq_len_q == BLOCK_SIZE
    assert metadata.cache_seqlens_int32.tolist() == [seq_len + BLOCK_SIZE for seq_len in SEQ_LENS]
    assert_pages(metadata.page_table, trtllm_mha.req_to_token)


def test_trtllm_mla_is_laid_out_by_the_plan(trtllm_mla, device):
    block_plan = plan.block_plan(trtllm_mla, BLOCK_SIZE)
    assert type(block_plan) is plan.PagedPlan and not block_plan.needs_host_lens
    trtllm_mla.init_cuda_graph_state(BS, BS * BLOCK_SIZE)
    batch = batch_of([1] * BS, device)
    block_plan.capture(batch)
    batch.seq_lens.copy_(torch.tensor(SEQ_LENS))
    block_plan.record(batch)

    metadata = trtllm_mla.forward_decode_metadata
    assert metadata.seq_lens_k.tolist() == [seq_len + BLOCK_SIZE for seq_len in SEQ_LENS]
    assert_pages(metadata.block_kv_indices, trtllm_mla.req_to_token)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_of_two_backends_the_one_that_verifies_is_planned(trtllm_mha, mode):
    """`--prefill-attention-backend` and `--decode-attention-backend` name two."""
    both = object.__new__(HybridAttnBackend)
    both.spec_attn_is_decode = mode == "decode"
    both.prefill_backend, both.decode_backend = (None, trtllm_mha) if mode == "decode" else (trtllm_mha, None)
    assert type(plan.block_plan(both, BLOCK_SIZE)) is plan.PagedPlan
    assert trtllm_mha.max_context_len == WIDTH
    assert plan.parts(both) == [trtllm_mha]


def assert_pages(page_table: torch.Tensor, req_to_token: torch.Tensor) -> None:
    """Every request has its own pages, as many as its tokens with the block need."""
    for row, seq_len, pool_row in zip(page_table.tolist(), SEQ_LENS, [2, 0, 3]):
        num_pages = -(-(seq_len + BLOCK_SIZE) // PAGE_SIZE)
        first_slots = req_to_token[pool_row, ::PAGE_SIZE][:num_pages]
        assert row[:num_pages] == [slot // PAGE_SIZE for slot in first_slots.tolist()]


@pytest.mark.parametrize("has_room", [True, False])
def test_without_a_graph_a_block_after_the_context_stays_in_its_row(trtllm_mha, has_room, device):
    if has_room:
        plan.prepare_chains(trtllm_mha)
    table = torch.full((BS, trtllm_mha.max_num_pages), -1, dtype=torch.int32, device=device)
    batch = batch_of(SEQ_LENS, device)
    metadata = SimpleNamespace(page_table=table[:1], swa_page_table=None)
    lens = batch.seq_lens.int() + BLOCK_SIZE
    # Only the first request is laid out, so that what it writes after its row stays.
    trtllm_mha._fill_page_table_device(metadata, batch.req_pool_indices[:1], lens[:1])

    assert bool((table[1:] == -1).all()) is has_room
