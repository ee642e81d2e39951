"""How attention backends learn the layout of a batch of blocks whose forward is inside a CUDA graph.

SGLang prepares a backend before every replay (`init_forward_metadata_out_graph`). What that launches is recorded in the
graph instead, where the backend computes everything on the GPU; a host that only launches a replay is done sooner.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.common import is_flashinfer_available, log_info_on_rank0

from sglang_dflash.attention.trees import ChainAttentionBackend, NodeAttentionBackend, layer_obstacle, pool_obstacle

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

logger = logging.getLogger(__name__)


class BlockPlan(Protocol):
    """The layout of one backend's blocks, for every captured batch size.

    Attributes:
        needs_host_lens: `before_replay` reads `seq_lens_cpu` of its batch.
    """

    needs_host_lens: bool

    def capture(self, batch: ForwardBatch) -> None:
        """Bind the backend to the buffers of `batch`, which is about to be captured."""

    def record(self, batch: ForwardBatch) -> None:
        """Launch, inside the graph, what computes the layout of `batch`."""

    def before_replay(self, batch: ForwardBatch) -> None:
        """Where it `needs_host_lens`, prepare a replay; `batch` has the buffers of the graph, and `seq_lens_cpu`, [bs],
        the block included: no KV is longer than that."""


class _BackendPlan:
    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def capture(self, batch: ForwardBatch) -> None:
        self._backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def _lay_out(self, batch: ForwardBatch) -> None:
        # Anew: a batch's `KVLocPlan` keeps the slots that it has translated for sliding layers, and `out_cache_loc` has
        # others in every cycle.
        self._backend.kv_index_translator.bind_runner_slots(batch)
        self._backend.init_forward_metadata_out_graph(batch)


class RecordedPlan(_BackendPlan):
    """A backend that lays out blocks on the GPU alone: Triton, ours of nodes, and FA3 below."""

    needs_host_lens = False

    def record(self, batch: ForwardBatch) -> None:
        self._lay_out(batch)

    def before_replay(self, batch: ForwardBatch) -> None:
        pass


class PagedPlan(RecordedPlan):
    """FA3, which reads the KV of a request through its row of a page table.

    SGLang makes rows of a graph as wide as the context, and a block that begins in the last B tokens of it ends behind
    them. FA3 would find the pages of the next request there. So rows become as wide as those of `req_to_token`, before
    `init_cuda_graph_state` allocates them. Without a graph they are cut out of `req_to_token`.
    """

    def __init__(self, backend: FlashAttentionBackend) -> None:
        super().__init__(backend)
        backend.max_context_len = backend.req_to_token.shape[1]
        backend.max_num_pages = -(-backend.max_context_len // backend.page_size)


class ReplayPlan(_BackendPlan):
    """Any other backend, prepared before every replay as SGLang does it."""

    needs_host_lens = True

    def record(self, batch: ForwardBatch) -> None:
        pass

    def before_replay(self, batch: ForwardBatch) -> None:
        self._lay_out(batch)


class HybridPlan:
    """Full attention beside recurrent layers, which look for the slots of their states and for nothing else."""

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
        # As if the batch were captured: so SGLang does not count its padding on the host. Padded requests are those of
        # row 0 of `req_to_token`, whose state is in slot 0, and nobody's.
        self._backend.linear_attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)


def parts(backend: AttentionBackend) -> list[AttentionBackend]:
    """The backends that a model's layers have: one for full attention, and one for recurrent layers if it has any."""
    return backend.attn_backend_list if isinstance(backend, HybridLinearAttnBackend) else [backend]


def block_plan(backend: AttentionBackend, block_size: int) -> BlockPlan:
    """The leanest plan that a backend allows; it is made before the backend has buffers for graphs."""
    if isinstance(backend, HybridLinearAttnBackend):
        return HybridPlan(backend, block_plan(backend.full_attn_backend, block_size))
    # Imported here: without a GPU's libraries there are no such backends.
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if isinstance(backend, FlashAttentionBackend):
        return PagedPlan(backend)
    if isinstance(backend, TritonAttnBackend | NodeAttentionBackend):
        return RecordedPlan(backend)
    if is_flashinfer_available():
        from sglang_dflash.attention.flashinfer_plan import FlashInferPlan

        if FlashInferPlan.supports(backend):
            return FlashInferPlan(backend, block_size)
    logger.info(
        "%s is prepared by the host before every decode cycle: it lays out its KV with lengths that the host reads.",
        type(backend).__name__,
    )
    return ReplayPlan(backend)


def chain_attention(target_runner: ModelRunner, block_size: int) -> ChainAttentionBackend | None:
    """What verifies chains in graphs in place of a target's own backend; None: that backend does.

    In every layer FlashInfer merges the parts of all requests in a launch of its own, also of those that have one part.
    With `--enable-deterministic-inference` it splits no KV (`flashinfer_plan`).
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


# Of the lists of KV slots that these attention backends keep for the blocks of a graph.
INDEX_DTYPES = {"flashinfer": torch.int32, "triton": torch.int64}
# Entries that FlashInfer adds to such a list (`FlashInferIndicesUpdaterPrefill.call_begin_forward`).
_SPARE_INDICES = 256


def bound_index_buffer(backend: AttentionBackend, whole: AttentionBackend | None) -> None:
    """Have a backend, which has no buffers for graphs yet, list the KV slots of a batch of blocks once per request.

    SGLang makes room for a context per token, as EAGLE's drafts need it, and for masks of trees. Blocks are chains.

    Args:
        whole: of the same kind, for wider blocks: no two widths are in use at a time, so its lists serve both.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend, whole = parts(backend)[0], whole and parts(whole)[0]
    is_flashinfer = _is_flashinfer(backend)
    if not is_flashinfer and type(backend) is not TritonAttnBackend:
        return
    init_cuda_graph_state = backend.init_cuda_graph_state

    def init_bounded(max_bs: int, max_num_tokens: int) -> None:
        if whole is None:
            # A cycle may be planned with lengths that have its block twice.
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
    """Whether a backend that asks for sequence lengths on the CPU needs no more than upper bounds for blocks."""
    return _is_flashinfer(parts(backend)[0])


def _is_flashinfer(backend: AttentionBackend) -> bool:
    if not is_flashinfer_available():
        return False
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return type(backend) is FlashInferAttnBackend
