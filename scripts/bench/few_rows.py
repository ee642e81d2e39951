"""A linear layer for few rows, in Triton, as a candidate that the package does not use; and what stands around it.

Split along K where there are too few columns to fill the GPU, the partial sums added up in order by whichever thread
block comes last, or by the norm behind; for gate_up with the activation behind it. With programmatic dependent launch
(PDL) kernels start while the one before still runs, and may fetch weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# When a kernel lets the next one start: when it ends; when it starts; then, fetching its first weights while it waits
# for the one before; when nothing is left but to write its results.
PDL = ("no", "early", "fetch", "late")
# What a block of threads may have of an H100's; checked before anything is compiled.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
        columns, depth: of a tile of weights.
        stages: tiles in flight.
        splits: thread blocks that share a column's K.
        tma: whether weights are loaded by the tensor memory accelerator.
    """

    columns: int
    depth: int
    stages: int
    warps: int
    splits: int
    tma: bool

    def fits(self, rows: int, is_gated: bool) -> bool:
        return self.stages * (self.columns * (1 + is_gated) + rows) * self.depth * 2 <= SHARED_MEMORY


@triton.jit
def _load_weights(weight, descriptor, first_row, column, k, num_columns, size_k, TMA: tl.constexpr):
    if TMA:
        return descriptor.load([tl.cast(first_row, tl.int32), tl.cast(tl.min(k), tl.int32)])
    inside = (column[:, None] < num_columns) & (k[None, :] < size_k)
    return tl.load(
        weight + (first_row + tl.arange(0, column.shape[0]))[:, None] * size_k + k[None, :], mask=inside, other=0.0
    )


@triton.jit
def _prefetch(weight, first_row, column, first_k, num_columns, size_k, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Into the L2 cache: the first two tiles of some rows of weights, a pointer for each line of 64 numbers."""
    row = first_row + tl.arange(0, COLUMNS)
    line = first_k + tl.arange(0, 2 * DEPTH // 64) * 64
    is_line = (column[:, None] < num_columns) & (line[None, :] < size_k)
    pointers = weight + tl.where(is_line, row[:, None] * size_k + line[None, :], 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_parts(parts, stride, splits, inside):
    """In order, so that the sum does not depend on who came last."""
    total = tl.load(parts, mask=inside, other=0.0, cache_modifier=".cg")
    for split in range(1, splits):
        total += tl.load(parts + split * stride, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _linear_kernel(
    x,
    x_stride,
    weight,
    descriptor,
    out,
    partials,
    arrivals,
    num_rows,
    num_columns,
    size_k,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IN_PARTS: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    steps = tl.cdiv(size_k, DEPTH)
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    # Of the activated half, where there is one: its weights lie behind the others.
    gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    first_row = tile * COLUMNS
    up_row = first_row + num_columns if IS_GATED else first_row

    if PDL == "early" or PDL == "fetch":
        gdc_launch_dependents()
    if PDL == "fetch":
        # They do not depend on the kernel before, only x does.
        _prefetch(weight, up_row, column, begin * DEPTH, num_columns, size_k, COLUMNS, DEPTH)
        if IS_GATED:
            _prefetch(weight, first_row, column, begin * DEPTH, num_columns, size_k, COLUMNS, DEPTH)
    if PDL != "no":
        gdc_wait()

    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * DEPTH + lane
        inside = (row[None, :] < num_rows) & (k[:, None] < size_k)
        rows = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        w = _load_weights(weight, descriptor, up_row, column, k, num_columns, size_k, TMA)
        total = tl.dot(w, rows, total)
        if IS_GATED:
            w = _load_weights(weight, descriptor, first_row, column, k, num_columns, size_k, TMA)
            gate = tl.dot(w, rows, gate)

    if PDL == "late":
        gdc_launch_dependents()
    at = row[None, :] * num_columns + column[:, None]
    inside = (column[:, None] < num_columns) & (row[None, :] < num_rows)
    is_last = True
    if IS_SPLIT or IN_PARTS:
        # [splits, 2 where gated, M, N]
        parts, size = partials + at, tl.cast(num_rows, tl.int64) * num_columns
        stride = size * (2 if IS_GATED else 1)
        tl.store(parts + split * stride, total, mask=inside)
        if IS_GATED:
            tl.store(parts + split * stride + size, gate, mask=inside)
    if IN_PARTS:
        is_last = False
    elif IS_SPLIT:
        # Every thread's part is written before this block counts as arrived.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1) == splits - 1
        if is_last:
            total = _sum_parts(parts, stride, splits, inside)
            if IS_GATED:
                gate = _sum_parts(parts + size, stride, splits, inside)
            tl.store(arrivals + tile, 0)
    if is_last:
        if IS_GATED:
            # As SGLang's SiluAndMul: of halves that were rounded.
            gate = gate.to(out.dtype.element_ty).to(tl.float32)
            total = total.to(out.dtype.element_ty).to(tl.float32) * gate / (1 + tl.exp(-gate))
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


class Linear:
    """x [M, K] @ weight [N, K].T in one configuration, with scratch memory of its own. Gated: silu(a) * b of the halves
    a and b of such a product's columns. In parts: [splits, M, N] float32, to be added up."""

    def __init__(
        self,
        config: Config,
        num_rows: int,
        num_columns: int,
        is_gated: bool = False,
        pdl: str = "no",
        in_parts: bool = False,
    ) -> None:
        self.config, self.is_gated, self.pdl, self.in_parts = config, is_gated, pdl, in_parts
        self.num_columns = num_columns
        self.rows = max(16, triton.next_power_of_2(num_rows))
        self.tiles = triton.cdiv(num_columns, config.columns)
        size = config.splits * (1 + is_gated) * num_rows * num_columns
        self.partials = torch.empty(size, dtype=torch.float32, device=DEVICE)
        self.arrivals = torch.zeros(self.tiles, dtype=torch.int32, device=DEVICE)

    @property
    def fits(self) -> bool:
        return self.config.fits(self.rows, self.is_gated)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self.config
        out = torch.empty((x.shape[0], self.num_columns), dtype=x.dtype, device=x.device)
        _linear_kernel[(self.tiles, config.splits)](
            x,
            x.stride(0),
            weight,
            TensorDescriptor.from_tensor(weight, [config.columns, config.depth]) if config.tma else weight,
            out,
            self.partials,
            self.arrivals,
            x.shape[0],
            self.num_columns,
            weight.shape[1],
            config.splits,
            ROWS=self.rows,
            COLUMNS=config.columns,
            DEPTH=config.depth,
            IS_SPLIT=config.splits > 1,
            IS_GATED=self.is_gated,
            IN_PARTS=self.in_parts,
            TMA=config.tma,
            PDL=self.pdl,
            STAGES=config.stages,
            num_warps=config.warps,
            launch_pdl=self.pdl != "no",
        )
        if self.in_parts:
            parts = self.partials[: config.splits * x.shape[0] * self.num_columns]
            return parts.view(config.splits, x.shape[0], self.num_columns)
        return out


@triton.jit
def _add_norm_kernel(x, residual, weight, out, num_rows, SIZE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    if PDL == "early" or PDL == "fetch":
        gdc_launch_dependents()
    if PDL != "no":
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = row * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + at).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * num_rows * SIZE + at).to(tl.float32)
    total = total.to(residual.dtype.element_ty).to(tl.float32) + tl.load(residual + at).to(tl.float32)
    if PDL == "late":
        gdc_launch_dependents()
    tl.store(residual + at, total.to(residual.dtype.element_ty))
    scale = tl.rsqrt(tl.sum(total * total) / SIZE + 1e-6)
    normed = total * scale * tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty))


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, pdl: str) -> torch.Tensor:
    """What stands between two GEMMs: [M, H], or parts of it [splits, M, H], in, and [M, H] out; `residual` changed in
    place."""
    out = torch.empty_like(residual)
    _add_norm_kernel[(len(residual),)](
        x,
        residual,
        weight,
        out,
        len(residual),
        SIZE=residual.shape[1],
        PARTS=len(x) if x.dim() == 3 else 1,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl != "no",
    )
    return out


@triton.jit
def _activate_kernel(x, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(x + row * 2 * SIZE + column).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + column).to(tl.float32)
    tl.store(out + row * SIZE + column, (up * gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty))


def activate(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the columns, times the second."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _activate_kernel[(x.shape[0], out.shape[1] // 2048)](x, out, SIZE=out.shape[1], TILE=2048)
    return out


def in_torch(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    out = x.float() @ weight.float().T
    if is_gated:
        gate, up = out.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return out
