"""Arguments of the cycle's operations: Triton kernels, their torch references, and their callers.

Letters of shapes, in the whole package:

    bs  requests of a batch; n: some of them
    P   requests of a CUDA graph, padding included
    B   block size of the drafter: the bonus token and B - 1 drafts
    W   draft length: tokens of a block in this cycle, the bonus token included; W <= B
    N   verified tokens of a request in this cycle: nodes of a tree, or W of a chain
    K   candidates for each position of a block
    T   tokens of a batch
    V   vocabulary, or one tensor-parallel rank's shard of it
    H   hidden size
    F   captured layers of the target
    L   layers
    r   rank: numbers of a vector of a token in scores of pairs

Gated DeltaNet: HK key heads of size DK, HV value heads of size DV, and a convolution of C channels, whose state has its
last S inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Per request: W output tokens, the accept length, the bonus token, the new sequence length.
_SCALARS_PER_REQUEST = 3


@dataclass(frozen=True)
class DrawParameters:
    """Sampling parameters of P requests: the tensors of SGLang's `SamplingBatchInfo`, or copies of them.

    Attributes:
        temperatures: [P] float32, positive.
        top_ks: [P] int32. A request with 1 or less is greedy, whatever the other parameters are.
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
        """Return views of the first `bs` requests."""
        return DrawParameters(self.temperatures[:bs], self.top_ks[:bs], self.top_ps[:bs], self.min_ps[:bs])


@dataclass(frozen=True)
class Block:
    """Input blocks of a decode cycle of P requests, in memory that a CUDA graph may own. int64 except `parameters`.

    Attributes:
        input_ids: [P * W]. The bonus token and W - 1 mask tokens of each request.
        positions: [P * W]. True positions.
        out_cache_loc: [P * W]. KV slots of those positions.
        req_pool_indices: [P]. Rows of `req_to_token`.
        seq_lens: [P]. Committed tokens that have KV, which is the bonus token's position.
        parameters: sampling parameters of the target's tokens.
        keys: [P]. Keys of the noise of these draws; see :mod:`sglang_dflash.ops.noise`.
        advances_states: [1]. 1: the cycle advances recurrent states. 0: they advance after it.
        is_chain: [P]. 1: the request needs SGLang's sampler, so its drafts are a chain, without noise. 0 otherwise.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    parameters: DrawParameters
    keys: torch.Tensor
    advances_states: torch.Tensor
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
        """Return a block around these tensors. It allocates the others, for greedy requests."""
        bs, device = seq_lens.shape[0], seq_lens.device
        advances_states = torch.zeros(1, dtype=torch.int64, device=device)
        keys, is_chain = torch.zeros((2, bs), dtype=torch.int64, device=device).unbind()
        parameters = DrawParameters.greedy(bs, device)
        return cls(
            input_ids, positions, out_cache_loc, req_pool_indices, seq_lens, parameters, keys, advances_states, is_chain
        )

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and KV slots."""
        return self.input_ids, self.positions, self.out_cache_loc

    def first_rows(self, num_rows: int) -> Block:
        """Return the first `num_rows` rows of each request: copies, or this block if it has no more."""
        bs = self.seq_lens.shape[0]
        if self.input_ids.shape[0] == bs * num_rows:
            return self
        ids, positions, slots = (rows.view(bs, -1)[:, :num_rows].flatten() for rows in self.rows)
        return replace(self, input_ids=ids, positions=positions, out_cache_loc=slots)

    def take(self, bs: int, block_size: int) -> Block:
        """Return views of the first `bs` requests, with W = `block_size`."""
        rows = slice(bs * block_size)
        return Block(
            self.input_ids[rows],
            self.positions[rows],
            self.out_cache_loc[rows],
            self.req_pool_indices[:bs],
            self.seq_lens[:bs],
            self.parameters.take(bs),
            self.keys[:bs],
            self.advances_states,
            self.is_chain[:bs],
        )


@dataclass(frozen=True)
class Trees:
    """Trees of drafts that the target verifies, in memory that a CUDA graph may own. int64.

    Node 0, the root, is the bonus token. Nodes are in topological order. Unused nodes are padding: they have no parent,
    see only themselves and the context, and are never accepted.

    Attributes:
        tokens: [P * N].
        positions: [P * N]. True positions. Nodes of a request at the same depth have the same.
        out_cache_loc: [P * N]. KV slots of the request's next N positions, in this order.
        parents: [P, N]. Index of each node's parent; -1 for the root and for padding.
        ancestors: [P, N]. Bit i of a node is set if it sees node i: its ancestors and itself.
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
class PairVectors:
    """Vectors whose products are the scores of pairs of drafts, of a drafter that has such scores.

    Attributes:
        before: [V, r]. Of the first token of a pair, contiguous.
        after: [V, r]. Of the second token, contiguous.
        gates: [bs, W - 1, K, r]. Factors of `before` for candidate a of the position before; dimensions may be
            expanded, but the last one. None: there are none.
    """

    before: torch.Tensor
    after: torch.Tensor
    gates: torch.Tensor | None


@dataclass(frozen=True)
class States:
    """States of Gated DeltaNet layers by slot. Slot 0 is for padding.

    Attributes:
        conv: [L, slots, C, S]. The last inputs of the convolution.
        temporal: [L, slots, HV, DV, DK] float32, as in `ops.reference.delta_rule`.
    """

    conv: torch.Tensor
    temporal: torch.Tensor


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of the recurrent states from every verified token. The states after any path follow from them.

    Row i belongs to the i-th request of the batch.

    Attributes:
        conv: [L, rows, N, C]. Inputs of the convolution.
        key: [L, rows, N, HK, DK]. Keys before their norm.
        change: [L, rows, N, HV, DV] float32. What each token adds to the state at its key, divided by the key's length.
        log_decay: [L, rows, N, HV] float32. Logarithm of the decay of the state before each token.
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
    """Slots of each request's states, by its row of `req_to_token`. Row 0 is for padding.

    Attributes:
        current: [rows] int32. Slot of the state after the last committed token; 0 for padding.
        kept: [rows, 1 or 2] int64. Slots of states for the prefix cache, used in turn; None: no states are kept.
        turn: [rows] int32, not negative. The state after i * interval tokens goes to slot (turn + i) % `kept.shape[1]`.
    """

    current: torch.Tensor
    kept: torch.Tensor | None
    turn: torch.Tensor


@dataclass(frozen=True)
class KVBuffers:
    """KV pool of the drafter, by layer.

    Attributes:
        k, v: L tensors [slots, KV heads, head size] of `dtype`, or of uint8, as SGLang stores fp8.
        k_ptrs, v_ptrs: [L] uint64. Addresses of these tensors.
        dtype: dtype of keys and values.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    k_ptrs: torch.Tensor
    v_ptrs: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class KVRows:
    """All tensors of a KV pool, by slot.

    Attributes:
        buffers: contiguous tensors [slots, ...] of any dtype.
        pointers: [buffers] uint64. Addresses of these tensors.
        row_bytes: [buffers] int64. Bytes of one slot in each.
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
    """Work of each thread block of FlashInfer: one entry per request, query tile and KV chunk. int32 except the mask.

    Attributes:
        request_indices, qo_tile_indices, kv_tile_indices: [entries].
        block_valid_mask: [entries] bool. False for padding.
        o_indptr: [bs + 1]. Start of each request's partial outputs.
        merge_indptr: [bs * W + 1]. Start of each row's partial outputs.
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
    """Keys that each thread block attends to, for a batch of trees. int32.

    Attributes:
        chunks: [chunks, 6]. Request, first key, end of its keys, part, the request's context length, and its row of
            `req_to_token`. The part is -1 for the only chunk of a request. The request is -1 for padding.
        part_indptr: [bs + 1]. Start of each request's parts.
        arrivals: [bs * row tiles * KV heads], zeros between layers. Chunks of a request that have ended, while one
            layer's attention runs; None: another launch merges the parts.
    """

    chunks: torch.Tensor
    part_indptr: torch.Tensor
    arrivals: torch.Tensor | None


@dataclass(frozen=True)
class Acceptance:
    """Views into one flat int64 buffer `packed` of `[bs * W tokens | bs accept lengths | bs bonus | bs lengths]`.

    Attributes:
        packed: [bs * (W + 3)].
        out_tokens: [bs, W]. The first `accept_lens` of each request are committed. The last of them is its bonus token.
        accept_lens: [bs] in [1, W], with the bonus token.
        bonus_tokens: [bs].
        new_seq_lens: [bs]. `seq_lens + accept_lens`.
    """

    packed: torch.Tensor
    out_tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, bs: int, block_size: int) -> Acceptance:
        scalars = packed[bs * block_size :].view(_SCALARS_PER_REQUEST, bs)
        return cls(packed, packed[: bs * block_size].view(bs, block_size), *scalars.unbind())

    @classmethod
    def empty(cls, bs: int, block_size: int, device: torch.device) -> Acceptance:
        packed = torch.empty(bs * (block_size + _SCALARS_PER_REQUEST), dtype=torch.int64, device=device)
        return cls.of(packed, bs, block_size)

    def put(self, index: torch.Tensor, part: Acceptance) -> None:
        """Overwrite the requests at `index`, [n] int64, by those of `part`."""
        self.out_tokens[index] = part.out_tokens
        self.accept_lens[index] = part.accept_lens
        self.bonus_tokens[index] = part.bonus_tokens
        self.new_seq_lens[index] = part.new_seq_lens

    def take(self, bs: int) -> Acceptance:
        """Copy the first `bs` requests, so that the next replay of the graph cannot overwrite them."""
        padded_bs, block_size = self.out_tokens.shape
        copy = Acceptance.of(self.packed.clone(), padded_bs, block_size)
        return Acceptance(
            copy.packed,
            copy.out_tokens[:bs],
            copy.accept_lens[:bs],
            copy.bonus_tokens[:bs],
            copy.new_seq_lens[:bs],
        )
