"""How attention backends learn the layout of a batch of blocks whose forward is inside a CUDA graph.

SGLang prepares a backend before every replay (`init_forward_metadata_out_graph`). What that launches is recorded in the
graph instead, where the backend computes everything on the GPU; a host that only launches a replay is done sooner.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.utils.common import is_flashinfer_available

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
    """A backend that lays out blocks on the GPU alone: Triton, and FA3 below."""

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


def block_plan(backend: AttentionBackend, block_size: int) -> BlockPlan:
    """The leanest plan that a backend allows; it is made before the backend has buffers for graphs."""
    # Imported here: without a GPU's libraries there are no such backends.
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if isinstance(backend, FlashAttentionBackend):
        return PagedPlan(backend)
    if isinstance(backend, TritonAttnBackend):
        return RecordedPlan(backend)
    if is_flashinfer_available():
        from sglang_dflash.flashinfer_plan import FlashInferPlan

        if FlashInferPlan.supports(backend):
            return FlashInferPlan(backend, block_size)
    logger.info(
        "%s is prepared by the host before every decode cycle: it lays out its KV with lengths that the host reads.",
        type(backend).__name__,
    )
    return ReplayPlan(backend)


def is_planned_from_bounds(backend: AttentionBackend) -> bool:
    """Whether a backend that asks for sequence lengths on the CPU needs no more than upper bounds for blocks."""
    if not is_flashinfer_available():
        return False
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return type(backend) is FlashInferAttnBackend
