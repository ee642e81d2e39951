"""The CPU attention backend against a dense float64 reference, on SGLang's own layers and KV pools."""

from types import SimpleNamespace

import pytest
import torch
from support.attention_reference import dense_attention

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash_cpu.torch_native import VerifyTorchNativeAttnBackend

HEAD_DIM = 60
POOL_SIZE = 1024
FULL_LAYER, WINDOWED_LAYER = 0, 1
CONTEXT_LENS = [5, 1, 63, 130, 16]


class Case:
    """KV of some requests in scattered pages, and the queries of a forward after it.

    `keys[i]` and `values[i]` are [context_lens[i] + query_lens[i], kv_heads, head_dim], by position of request i. The
    pool has those of the context; the forward brings the others.
    """

    def __init__(
        self,
        context_lens,
        query_lens,
        num_heads=4,
        num_kv_heads=2,
        page_size=1,
        swa_pool=False,
        head_dim=HEAD_DIM,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.context_lens, self.query_lens = context_lens, query_lens
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        total_lens = [c + q for c, q in zip(context_lens, query_lens, strict=True)]
        self.queries = randn(sum(query_lens), num_heads, head_dim)
        self.keys = [randn(length, num_kv_heads, head_dim) for length in total_lens]
        self.values = [randn(length, num_kv_heads, head_dim) for length in total_lens]

        self.req_to_token_pool = ReqToTokenPool(len(context_lens) + 3, 256, "cpu", False)
        self.req_pool_indices = torch.randperm(len(context_lens) + 3, generator=generator)[: len(context_lens)] + 1
        pages = torch.randperm(POOL_SIZE // page_size - 1, generator=generator) + 1
        for row, length in zip(self.req_pool_indices, total_lens, strict=True):
            num_pages = -(-length // page_size)
            slots = (pages[:num_pages, None] * page_size + torch.arange(page_size)).flatten()[:length]
            pages = pages[num_pages:]
            self.req_to_token_pool.req_to_token[row, :length] = slots.to(torch.int32)

        sizes = {"dtype": torch.float32, "head_num": num_kv_heads, "head_dim": head_dim, "device": "cpu"}
        if swa_pool:
            self.kv_pool = SWAKVPool(
                size=POOL_SIZE,
                size_swa=POOL_SIZE,
                page_size=page_size,
                swa_attention_layer_ids=[WINDOWED_LAYER],
                full_attention_layer_ids=[FULL_LAYER],
                enable_alt_stream=False,
                **sizes,
            )
            self.kv_pool.register_mapping(torch.randperm(POOL_SIZE + page_size, generator=generator))
        else:
            self.kv_pool = MHATokenToKVPool(
                POOL_SIZE, page_size, layer_num=2, enable_memory_saver=False, enable_alt_stream=False, **sizes
            )
        self.backend = VerifyTorchNativeAttnBackend(
            SimpleNamespace(device="cpu", req_to_token_pool=self.req_to_token_pool, token_to_kv_pool=self.kv_pool)
        )

    def layer(self, bidirectional=False, window_size=-1):
        return RadixAttention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.num_kv_heads,
            layer_id=FULL_LAYER if window_size == -1 else WINDOWED_LAYER,
            sliding_window_size=window_size,
            attn_type=AttentionType.ENCODER_ONLY if bidirectional else AttentionType.DECODER,
        )

    def slots(self, start, end):
        """Return the slots of positions start[i]..end[i]-1 of all requests in order: [sum(end - start)] int64."""
        rows = self.req_to_token_pool.req_to_token[self.req_pool_indices]
        return torch.cat([row[s:e] for row, s, e in zip(rows, start, end, strict=True)]).to(torch.int64)

    def forward(self, layer, mode=ForwardMode.TARGET_VERIFY, poison_before_window=False):
        """Return the backend's output: [sum(query_lens), heads, head_dim]."""
        lens = torch.tensor(self.context_lens)
        query_lens = torch.tensor(self.query_lens)
        context = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(lens),
            input_ids=None,
            req_pool_indices=self.req_pool_indices,
            seq_lens=lens,
            out_cache_loc=self.slots([0] * len(lens), self.context_lens),
            seq_lens_sum=int(lens.sum()),
            extend_seq_lens=lens,
            extend_prefix_lens=torch.zeros_like(lens),
        )
        self.backend.init_forward_metadata(context)
        keys = torch.cat([k[:c] for k, c in zip(self.keys, self.context_lens, strict=True)])
        values = torch.cat([v[:c] for v, c in zip(self.values, self.context_lens, strict=True)])
        self.backend.forward(keys.new_zeros(len(keys), self.num_heads * self.head_dim), keys, values, layer, context)
        if poison_before_window:
            evicted = [max(0, c - layer.sliding_window_size) for c in self.context_lens]
            slots = self.kv_pool.translate_loc_from_full_to_swa(self.slots([0] * len(lens), evicted))
            self.kv_pool.get_key_buffer(layer.layer_id)[slots] = torch.nan
            self.kv_pool.get_value_buffer(layer.layer_id)[slots] = torch.nan

        verify = mode == ForwardMode.TARGET_VERIFY
        total_lens = lens + query_lens
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lens),
            input_ids=None,
            req_pool_indices=self.req_pool_indices,
            seq_lens=lens if verify else total_lens,
            out_cache_loc=self.slots(self.context_lens, total_lens),
            seq_lens_sum=int(lens.sum()),
            extend_seq_lens=query_lens,
            extend_prefix_lens=lens,
            spec_info=SimpleNamespace(draft_token_num=self.query_lens[0]) if verify else None,
        )
        self.backend.init_forward_metadata(batch)
        keys = torch.cat([k[c:] for k, c in zip(self.keys, self.context_lens, strict=True)])
        values = torch.cat([v[c:] for v, c in zip(self.values, self.context_lens, strict=True)])
        output = self.backend.forward(self.queries.flatten(1), keys, values, layer, batch)
        return output.view_as(self.queries)

    def reference(self, layer):
        """Return dense attention in float64: [sum(query_lens), heads, head_dim]."""
        mask = {
            # SGLang's window does not count the query's own key.
            "window": None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1,
            "causal": layer.attn_type != AttentionType.ENCODER_ONLY,
            "scale": self.head_dim**-0.5,
        }
        queries = self.queries.split(self.query_lens)
        return torch.cat([dense_attention(*each, **mask) for each in zip(queries, self.keys, self.values, strict=True)])


def check(case, layer, **kwargs):
    torch.testing.assert_close(case.forward(layer, **kwargs).double(), case.reference(layer), atol=2e-6, rtol=1e-5)


# Windows shorter than the block, and shorter than, equal to and longer than contexts; -1 for none.
@pytest.mark.parametrize("window_size", [-1, 3, 15, 16, 62, 63, 200])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_verify(window_size, bidirectional, block_size):
    case = Case(CONTEXT_LENS, [block_size] * len(CONTEXT_LENS))
    check(case, case.layer(bidirectional, window_size))


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (4, 4), (8, 2), (6, 1)])
def test_verify_head_groups(num_heads, num_kv_heads):
    case = Case(CONTEXT_LENS, [16] * len(CONTEXT_LENS), num_heads, num_kv_heads)
    check(case, case.layer())
    check(case, case.layer(bidirectional=True, window_size=20))


@pytest.mark.parametrize("page_size", [16, 64])
def test_verify_pages(page_size):
    case = Case(CONTEXT_LENS, [16] * len(CONTEXT_LENS), page_size=page_size)
    check(case, case.layer())
    check(case, case.layer(bidirectional=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_verify_around_the_window(page_size, head_dim, num_heads, num_kv_heads, bidirectional):
    """The window is not a multiple of the page. Contexts are shorter, equal, one longer, and much longer."""
    window = 50
    context_lens = [1, window - 1, window, window + 1, 4 * window]
    case = Case(context_lens, [16] * 5, num_heads, num_kv_heads, page_size, head_dim=head_dim)
    check(case, case.layer(bidirectional, window_size=window - 1))
    check(case, case.layer(bidirectional))


@pytest.mark.parametrize("window_size", [15, 40])
@pytest.mark.parametrize(
    "mode, query_lens",
    [
        (ForwardMode.TARGET_VERIFY, [16] * 5),
        (ForwardMode.EXTEND, [3, 20, 1, 33, 16]),
        (ForwardMode.DECODE, [1] * 5),
    ],
)
def test_swa_pool(mode, query_lens, window_size):
    """Windowed layers read the SWA pool's slots, and no slot that the pool may have freed."""
    case = Case(CONTEXT_LENS, query_lens, page_size=16, swa_pool=True)
    check(case, case.layer(window_size=window_size), mode=mode, poison_before_window=True)
    check(case, case.layer(), mode=mode)


def test_batch_does_not_change_a_request():
    """A request's output is the same in every bit, so that acceptance does not depend on other requests."""
    alone = Case(CONTEXT_LENS[:1], [16])
    together = Case(CONTEXT_LENS, [16] * len(CONTEXT_LENS))
    together.queries[:16] = alone.queries
    together.keys[0], together.values[0] = alone.keys[0], alone.values[0]
    expected = alone.forward(alone.layer(window_size=9))
    assert torch.equal(together.forward(together.layer(window_size=9))[:16], expected)
