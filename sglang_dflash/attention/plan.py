"""Plans: what tells an attention backend the layout of a batch of blocks whose forward is inside a CUDA graph.

SGLang prepares a backend before every replay (`init_forward_metadata_out_graph`). Where a backend computes its layout
on the GPU alone, the graph records that work instead, and the host only launches the replay.

Shapes: bs requests, B tokens of a block.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.common import is_flashinfer_available, log_info_on_rank0

from sglang_dflash.attention.trees import ChainAttentionBackend, NodeAttentionBackend, layer_obstacle, pool_obstacle

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
    from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend

    PagedBackend = FlashAttentionBackend | TRTLLMHAAttnBackend | TRTLLMMLABackend

logger = logging.getLogger(__name__)


class BlockPlan(Protocol):
    """The layout of one backend's blocks, for every captured batch size.

    Attributes:
        needs_host_lens: bool. Whether the host has to call `before_replay` with the lengths of all requests.
    """

    needs_host_lens: bool

    def capture(self, batch: ForwardBatch) -> None:
        """Bind the backend to the buffers of `batch`, which is about to be captured."""

    def record(self, batch: ForwardBatch) -> None:
        """Launch the kernels that compute the layout of `batch`; they are recorded in the graph."""

    def before_replay(self, batch: ForwardBatch) -> None:
        """Prepare a replay, if the plan `needs_host_lens`.

        Args:
            batch: over the buffers of the graph, with `seq_lens_cpu`, [bs] int64: upper bounds of the KV lengths, the
                block included.
        """


class _BackendPlan:
    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def capture(self, batch: ForwardBatch) -> None:
        self._backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def _lay_out(self, batch: ForwardBatch) -> None:
        # A batch's `KVLocPlan` keeps the slots that it has translated for sliding layers. `out_cache_loc` changes in
        # every cycle, so they are translated again.
        self._backend.kv_index_translator.bind_runner_slots(batch)
        self._backend.init_forward_metadata_out_graph(batch)


class RecordedPlan(_BackendPlan):
    """The plan of a backend that lays out blocks on the GPU alone: Triton's and `NodeAttentionBackend`."""

    needs_host_lens = False

    def record(self, batch: ForwardBatch) -> None:
        self._lay_out(batch)

    def before_replay(self, batch: ForwardBatch) -> None:
        pass


class PagedPlan(RecordedPlan):
    """The plan of a backend that reads the KV of a request through a row of a page table: FA3, FA4 and TRT-LLM.

    FA3, FA4 and TRT-LLM's latent attention are laid out by `init_forward_metadata_out_graph`, which launches kernels
    only. TRT-LLM's other attention does that in `init_forward_metadata_in_graph`, which SGLang records itself.
    """

    def __init__(self, backend: PagedBackend) -> None:
        super().__init__(backend)
        widen_page_table(backend)


class ReplayPlan(_BackendPlan):
    """The plan of any other backend: the host prepares it before every replay, as SGLang does."""

    needs_host_lens = True

    def record(self, batch: ForwardBatch) -> None:
        pass

    def before_replay(self, batch: ForwardBatch) -> None:
        self._lay_out(batch)


class HybridPlan:
    """The plan of a target with recurrent layers: that of its full attention, and the slots of the states."""

    def __init__(self, backend: HybridLinearAttnBackend, full_attention: BlockPlan) -> None:
        self._backend, self._full_attention = backend, full_attention
        self.needs_host_lens = full_attention.needs_host_lens

    def capture(self, batch: ForwardBatch) -> None:
        self._full_attention.capture(batch)
        self._lay_out_states(batch)

    def record(self, batch: ForwardBatch) -> None:
        self._full_attention.record(batch)
        self._lay_out_states(batch)

    def before_replay(self, batch: ForwardBatch) -> None:
        self._full_attention.before_replay(batch)

    def _lay_out_states(self, batch: ForwardBatch) -> None:
        # With `in_capture` SGLang does not count padded requests on the host. They are in row 0 of `req_to_token`,
        # whose state is in slot 0, which no request has.
        self._backend.linear_attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)


def verifying(backend: AttentionBackend) -> AttentionBackend:
    """Return the backend that verifies blocks: of those for prefill and for decode, the one of its attention mode."""
    if not isinstance(backend, HybridAttnBackend):
        return backend
    return backend.decode_backend if backend.spec_attn_is_decode else backend.prefill_backend


def parts(backend: AttentionBackend) -> list[AttentionBackend]:
    """Return the backends that verify blocks: the one of full attention, then the one of recurrent layers, if any."""
    backends = backend.attn_backend_list if isinstance(backend, HybridLinearAttnBackend) else [backend]
    return [verifying(each) for each in backends]


def widen_page_table(backend: PagedBackend) -> None:
    """Make rows of a page table as wide as those of `req_to_token`, before the backend allocates its buffers.

    SGLang makes them as wide as the context. A block that begins in the last B tokens of the context ends after it, and
    the backend would take pages of the next request for its own.
    """
    backend.max_context_len = backend.req_to_token.shape[1]
    # TRT-LLM's latent attention computes its number of pages from `max_context_len`.
    if not _is_trtllm_mla(backend):
        backend.max_num_pages = -(-backend.max_context_len // backend.page_size)


def block_plan(backend: AttentionBackend, block_size: int) -> BlockPlan:
    """Return the plan of a backend with the least work for the host.

    Args:
        backend: without buffers for graphs so far.
        block_size: verified tokens of a request.
    """
    if isinstance(backend, HybridLinearAttnBackend):
        return HybridPlan(backend, block_plan(backend.full_attn_backend, block_size))
    backend = verifying(backend)
    # Imported here, as in the functions below: a machine without a GPU does not load these backends.
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if isinstance(backend, FlashAttentionBackend) or _is_trtllm_mha(backend) or _is_trtllm_mla(backend):
        return PagedPlan(backend)
    if isinstance(backend, TritonAttnBackend | NodeAttentionBackend):
        return RecordedPlan(backend)
    if is_flashinfer_available():
        from sglang_dflash.attention.flashinfer_plan import FlashInferPlan

        if FlashInferPlan.supports(backend):
            return FlashInferPlan(backend, block_size)
    logger.info(
        "The host prepares %s before every decode cycle: it lays out its KV with lengths that the host reads.",
        type(backend).__name__,
    )
    return ReplayPlan(backend)


def prepare_chains(backend: AttentionBackend) -> None:
    """Give a target's backend room for chains that it verifies without a graph.

    TRT-LLM allocates a page table as wide as the context for every forward. The others have room, see `PagedPlan`.
    """
    full_attention = parts(backend)[0]
    if _is_trtllm_mha(full_attention):
        widen_page_table(full_attention)


def chain_attention(target_runner: ModelRunner, block_size: int) -> ChainAttentionBackend | None:
    """Return the attention that verifies chains in graphs instead of FlashInfer's; None: the target's own backend does.

    FlashInfer merges the parts of split KV in one more launch per layer, also for requests that have one part. With
    `--enable-deterministic-inference` it splits no KV (`flashinfer_plan`), and stays.

    Args:
        target_runner: has its KV pools and its attention backend, and no graphs so far.
        block_size: verified tokens of a request.
    """
    backend = target_runner.attn_backend
    if not _is_flashinfer(backend) or backend.enable_deterministic:
        return None
    from sglang_dflash.attention.flashinfer_plan import FlashInferPlan

    if not FlashInferPlan.supports(backend):
        return None
    obstacle = _chain_obstacle(target_runner, block_size)
    if obstacle is None:
        log_info_on_rank0(logger, "Graphs verify chains by DFLASH's own attention, in place of FlashInfer's.")
        return ChainAttentionBackend(target_runner)
    log_info_on_rank0(logger, f"Graphs verify chains by FlashInfer's attention, not by DFLASH's own: {obstacle}.")
    return None


def _chain_obstacle(target_runner: ModelRunner, block_size: int) -> str | None:
    from sglang_dflash.ops.kernels.attend_trees import MAX_NODES, SHARED_MEMORY

    if block_size > MAX_NODES:
        return f"blocks have more than {MAX_NODES} tokens"
    if torch.cuda.get_device_properties(target_runner.gpu_id).shared_memory_per_block_optin < SHARED_MEMORY:
        return f"thread blocks of this GPU have less than {SHARED_MEMORY >> 10} KiB of shared memory"
    return layer_obstacle(target_runner.model) or pool_obstacle(target_runner.token_to_kv_pool)


# Dtype of the lists of KV slots that an attention backend keeps for the blocks of a graph.
INDEX_DTYPES = {"flashinfer": torch.int32, "triton": torch.int64}
# Entries that FlashInfer adds to such a list (`FlashInferIndicesUpdaterPrefill.call_begin_forward`).
_SPARE_INDICES = 256


def bound_index_buffer(backend: AttentionBackend, whole: AttentionBackend | None) -> None:
    """Make a backend allocate room for the KV slots of a batch of blocks once per request.

    SGLang makes room for one context per token, which EAGLE's drafts need, and for masks of trees.

    Args:
        backend: without buffers for graphs so far.
        whole: a backend of the same kind for blocks that are as wide or wider. Only one is in use at a time, so both
            share its lists.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend, whole = parts(backend)[0], whole and parts(whole)[0]
    is_flashinfer = _is_flashinfer(backend)
    if not is_flashinfer and type(backend) is not TritonAttnBackend:
        return
    init_cuda_graph_state = backend.init_cuda_graph_state

    def init_bounded(max_bs: int, max_num_tokens: int) -> None:
        if whole is None:
            # Lengths that a cycle is planned with may include its block twice.
            max_len = backend.req_to_token_pool.req_to_token.shape[1] + max_num_tokens // max_bs
            dtype = INDEX_DTYPES["flashinfer" if is_flashinfer else "triton"]
            size = max_bs * max_len + _SPARE_INDICES
            kv_indices = torch.zeros(size, dtype=dtype, device=backend.req_to_token_pool.device)
        else:
            kv_indices = whole.cuda_graph_kv_indices[0] if is_flashinfer else whole.cuda_graph_kv_indices
        init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf=kv_indices)
        if is_flashinfer:
            backend.cuda_graph_custom_mask = None
            if whole is not None:
                backend.cuda_graph_kv_indices = whole.cuda_graph_kv_indices

    backend.init_cuda_graph_state = init_bounded


def is_planned_from_bounds(backend: AttentionBackend) -> bool:
    """Return whether a backend that asks for sequence lengths on the CPU needs upper bounds only, for blocks."""
    return _is_flashinfer(parts(backend)[0])


def _is_trtllm_mha(backend: AttentionBackend) -> bool:
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    return type(backend) is TRTLLMHAAttnBackend


def _is_trtllm_mla(backend: AttentionBackend) -> bool:
    from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend

    return type(backend) is TRTLLMMLABackend


def _is_flashinfer(backend: AttentionBackend) -> bool:
    if not is_flashinfer_available():
        return False
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return type(backend) is FlashInferAttnBackend
