"""Bytes of the tensors that PyTorch's operations allocate, on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Context in which the tensors that operations return are counted while they exist.

    Attributes:
        peak: most bytes that existed after an operation.
    """

    def __init__(self, *existing: Tensor) -> None:
        """
        Args:
            existing: tensors that are not counted, even if an operation returns a view of them.
        """
        super().__init__()
        self.peak = 0
        self._existing = {self._key(tensor) for tensor in existing}
        self._counted: dict[int, tuple[StorageWeakRef, int]] = {}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return StorageWeakRef(tensor.untyped_storage()).cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs or {})
        self._counted = {key: entry for key, entry in self._counted.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := self._key(tensor)) not in self._existing:
                storage = tensor.untyped_storage()
                self._counted[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._counted.values()))
        return result
