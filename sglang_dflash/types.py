"""What the cycle's operations are called with: Triton kernels, their torch twins, and what calls them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DrawParameters:
    """How the tokens of P requests are drawn: the tensors of SGLang's `SamplingBatchInfo`, or copies of them.

    Attributes:
        temperatures: [P] float32, positive.
        top_ks: [P] int32; with 1 or less a request is greedy, and the others do not matter.
        top_ps: [P] float32 in (0, 1].
        min_ps: [P] float32 in [0, 1].
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    @classmethod
    def greedy(cls, bs: int, device: torch.device) -> DrawParameters:
        temperatures, top_ps = torch.ones((2, bs), device=device).unbind()
        top_ks = torch.ones(bs, dtype=torch.int32, device=device)
        return cls(temperatures, top_ks, top_ps, torch.zeros(bs, device=device))

    def take(self, bs: int) -> DrawParameters:
        """Views of the first `bs` requests."""
        return DrawParameters(self.temperatures[:bs], self.top_ks[:bs], self.top_ps[:bs], self.min_ps[:bs])


@dataclass(frozen=True)
class Block:
    """What a decode cycle of P requests reads, in memory that a CUDA graph may own; int64 but for the parameters.

    Attributes:
        input_ids: [P * B], the bonus token and B - 1 mask tokens of each request.
        positions: [P * B], true positions.
        out_cache_loc: [P * B], the KV slots of those positions.
        req_pool_indices: [P], rows of `req_to_token`.
        seq_lens: [P], committed tokens that have KV; the bonus token's position.
        parameters: how the target's tokens are drawn.
        seed: [1], of those draws.
        is_plain: [1], whether all requests are accepted by the plain rule, 1 or 0; then recurrent states advance
            right after it.
        is_chain: [P], 1 for requests whose drafts are verified as a chain where those of others are trees, else 0.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    parameters: DrawParameters
    seed: torch.Tensor
    is_plain: torch.Tensor
    is_chain: torch.Tensor

    @classmethod
    def empty(cls, bs: int, block_size: int, device: torch.device) -> Block:
        rows = torch.empty((3, bs * block_size), dtype=torch.int64, device=device)
        requests = torch.empty((2, bs), dtype=torch.int64, device=device)
        return cls.of(*rows.unbind(), *requests.unbind())

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> Block:
        """Around those tensors, the others in memory of their own."""
        bs, device = seq_lens.shape[0], seq_lens.device
        seed, is_plain = torch.zeros((2, 1), dtype=torch.int64, device=device).unbind()
        is_chain = torch.zeros(bs, dtype=torch.int64, device=device)
        parameters = DrawParameters.greedy(bs, device)
        return cls(
            input_ids, positions, out_cache_loc, req_pool_indices, seq_lens, parameters, seed, is_plain, is_chain
        )

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and slots."""
        return self.input_ids, self.positions, self.out_cache_loc

    def take(self, bs: int, block_size: int) -> Block:
        """Views of the first `bs` requests."""
        rows = slice(bs * block_size)
        return Block(
            self.input_ids[rows],
            self.positions[rows],
            self.out_cache_loc[rows],
            self.req_pool_indices[:bs],
            self.seq_lens[:bs],
            self.parameters.take(bs),
            self.seed,
            self.is_plain,
            self.is_chain[:bs],
        )


@dataclass(frozen=True)
class Trees:
    """Drafts that the target verifies, N nodes for each of P requests, in memory that a CUDA graph may own; int64.

    Node 0, the root, is the bonus token. A node is in front of all that follow it on some path. A request may have
    fewer nodes than N; the rest are behind no other, see only themselves and the context, and are never accepted.

    Attributes:
        tokens: [P * N], of the nodes.
        positions: [P * N], true positions: those of a request's nodes at the same depth are the same.
        out_cache_loc: [P * N], the KV slots of the request's next N positions, in this order.
        parents: [P, N], the node that each is right behind; -1 for the root, and for those that are no nodes.
        ancestors: [P, N], bit i is set of the nodes that see node i: itself, and those behind it.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def empty(cls, bs: int, num_nodes: int, device: torch.device) -> Trees:
        rows = torch.empty((3, bs * num_nodes), dtype=torch.int64, device=device)
        nodes = torch.empty((2, bs, num_nodes), dtype=torch.int64, device=device)
        return cls(*rows.unbind(), *nodes.unbind())


@dataclass(frozen=True)
class States:
    """The states of Gated DeltaNet layers, in slots; slot 0 is for padding. L layers, S + 1 tokens of a convolution.

    Attributes:
        conv: [L, slots, C, S], the last inputs of the convolution.
        temporal: [L, slots, HV, V, K] float32, as in `ops.reference.delta_rule`.
    """

    conv: torch.Tensor
    temporal: torch.Tensor


@dataclass(frozen=True)
class BlockInputs:
    """What Gated DeltaNet layers computed for each of N verified nodes; the states after a path are made of it.

    Row i belongs to the i-th request of the batch.

    Attributes:
        conv: [L, rows, N, C], inputs of the convolution.
        key: [L, rows, N, H, K], before normalization.
        change: [L, rows, N, HV, V] float32, what the node adds to the state at its key, divided by the key's length.
        log_decay: [L, rows, N, HV] float32, of the state before the node.
    """

    conv: torch.Tensor
    key: torch.Tensor
    change: torch.Tensor
    log_decay: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.conv, self.key, self.change, self.log_decay))


@dataclass(frozen=True)
class StateSlots:
    """Which slots the states of a request are in, by its row of `req_to_token`; row 0 is for padding.

    Attributes:
        current: [rows] int32, of its last committed token; 0 for padding.
        kept: [rows, N] int64, N = 1 or 2, which take turns in what is kept for the prefix cache; None: nothing is.
        turn: [rows] int32: the state after i * interval tokens is kept in the (turn + i) % N-th of them; not negative.
    """

    current: torch.Tensor
    kept: torch.Tensor | None
    turn: torch.Tensor


@dataclass(frozen=True)
class KVBuffers:
    """The drafter's KV pool, layer by layer.

    Attributes:
        k, v: L tensors [slots, H, D] of `dtype`, or of uint8, as which SGLang stores fp8.
        k_ptrs, v_ptrs: [L] uint64, where those tensors begin.
        dtype: of the keys and values.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    k_ptrs: torch.Tensor
    v_ptrs: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class KVRows:
    """All that a KV pool has of every slot.

    Attributes:
        buffers: tensors [slots, ...] of any dtype, contiguous.
        pointers: [buffers] uint64, where those tensors begin.
        row_bytes: [buffers] int64, of one slot in each.
    """

    buffers: list[torch.Tensor]
    pointers: torch.Tensor
    row_bytes: torch.Tensor

    @classmethod
    def of(cls, buffers: list[torch.Tensor]) -> KVRows:
        device = buffers[0].device
        pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64, device=device)
        row_bytes = torch.tensor([buffer[0].nbytes for buffer in buffers], dtype=torch.int64, device=device)
        return cls(buffers, pointers, row_bytes)


@dataclass(frozen=True)
class KVSplit:
    """Which thread block does what; int32 but for the mask. One entry per (request, query tile, KV chunk).

    Attributes:
        request_indices, qo_tile_indices, kv_tile_indices: [P], of each entry.
        block_valid_mask: [P] bool, which of the P entries there are.
        o_indptr: [bs + 1], where the partial outputs of each request begin.
        merge_indptr: [bs * B + 1], where those of each row do.
        kv_chunk_size: [1].
    """

    request_indices: torch.Tensor
    qo_tile_indices: torch.Tensor
    kv_tile_indices: torch.Tensor
    block_valid_mask: torch.Tensor
    o_indptr: torch.Tensor
    merge_indptr: torch.Tensor
    kv_chunk_size: torch.Tensor


@dataclass(frozen=True)
class KeyChunks:
    """Which keys of a batch of trees a thread block attends to; int32.

    Attributes:
        chunks: [P, 6], of each chunk its request, its first key, the one behind its last, its part, and of the request
            the tokens of context and the row of `req_to_token`. The part is -1 if the request has one chunk, the
            request where there is no chunk.
        part_indptr: [bs + 1], where the parts of each request begin.
        arrivals: [bs * tiles of rows * KV heads], zeros: how many chunks of a request have ended, while one layer's
            attention runs. None: parts are merged by a launch of its own.
    """

    chunks: torch.Tensor
    part_indptr: torch.Tensor
    arrivals: torch.Tensor | None
