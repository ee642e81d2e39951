"""cuBLASLt's matrix product with a choice of algorithm, which PyTorch does not expose.

Source: cublasLt.h of CUDA 13. The functions and enumerations used here are the same in CUDA 12.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from functools import cache

import torch

_CUDA_R_32F, _CUDA_R_16BF = 0, 14
_COMPUTE_32F = 68
_DESC_TRANSA, _OP_T = 3, 1
_PREF_MAX_WORKSPACE_BYTES = 1

# The workspace that PyTorch gives cuBLAS on Hopper.
WORKSPACE_BYTES = 32 * 2**20


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLtError(RuntimeError):
    pass


@cache
def _library() -> ctypes.CDLL:
    # The library that PyTorch has loaded.
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


def _call(name: str, *arguments) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise CublasLtError(f"{name} returned {status}")


def _create(name: str, *arguments) -> c_void_p:
    created = c_void_p()
    _call(name, byref(created), *arguments)
    return created


def _set(name: str, owner: c_void_p, attribute: int, value) -> None:
    _call(name, owner, attribute, byref(value), c_size_t(ctypes.sizeof(value)))


@cache
def _handle() -> c_void_p:
    return _create("cublasLtCreate")


@cache
def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _pointer(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


class Product:
    """Product x [rows, depth] @ weight [columns, depth].T in bfloat16, summed in float32, for one number of rows.

    cuBLASLt's matrices are column-major, so it is given all three transposed.
    """

    def __init__(self, num_rows: int, num_columns: int, size_k: int) -> None:
        self._num_columns = num_columns
        self._operation = _create("cublasLtMatmulDescCreate", _COMPUTE_32F, _CUDA_R_32F)
        _set("cublasLtMatmulDescSetAttribute", self._operation, _DESC_TRANSA, c_int(_OP_T))

        def layout(rows: int, columns: int) -> c_void_p:
            shape = c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows)
            return _create("cublasLtMatrixLayoutCreate", _CUDA_R_16BF, *shape)

        self._weight, self._x, self._out = (
            layout(*shape) for shape in ((size_k, num_columns), (size_k, num_rows), (num_columns, num_rows))
        )

    def algorithms(self, most: int, workspace_bytes: int) -> list[Algorithm]:
        """Return up to `most` algorithms within a workspace size, in cuBLASLt's order of preference."""
        preference = _create("cublasLtMatmulPreferenceCreate")
        limit = c_size_t(workspace_bytes)
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREF_MAX_WORKSPACE_BYTES, limit)
        found, count = (_Found * most)(), c_int()
        problem = (self._operation, self._weight, self._x, self._out, self._out, preference)
        _call("cublasLtMatmulAlgoGetHeuristic", _handle(), *problem, most, found, byref(count))
        return [one.algorithm for one in found[: count.value] if not one.status]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, algorithm: Algorithm) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._num_columns)
        stream = torch.cuda.current_stream().cuda_stream
        product = (byref(c_float(1)), _pointer(weight), self._weight, _pointer(x), self._x)
        # The matrix to add, with factor 0, and the result.
        result = (byref(c_float(0)), _pointer(out), self._out, _pointer(out), self._out)
        scratch = (_pointer(_workspace()), c_size_t(WORKSPACE_BYTES))
        arguments = (*product, *result, byref(algorithm), *scratch, c_void_p(stream))
        _call("cublasLtMatmul", _handle(), self._operation, *arguments)
        return out
