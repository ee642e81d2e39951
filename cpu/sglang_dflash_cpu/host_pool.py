"""KV pools in host memory on a machine where the "device" is host memory too: copies by indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from torch import Tensor


def reserve_less() -> None:
    """Leave 1 GiB of host memory to other programs, where SGLang leaves 10."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def register_nothing(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Leave memory as it is, in place of page-locking it for a GPU."""


def load_layer(
    host: MHATokenToKVPoolHost,
    device_pool: MHATokenToKVPool,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer's keys and values of some tokens from the host pool.

    Args:
        host_indices: [T] int64. Slots of the host pool.
        device_indices: [T] int64. Slots of the device's pool, written.
        layer_id: of the pool.
        io_backend: must be "direct", with the layout "layer_first".
        is_draft: the pool is a drafter's, with layers of its own.
    """
    if not is_draft and not 0 <= layer_id < host.target_layer_num:
        return
    _check(host, io_backend)
    host.device_k_buffers[layer_id][device_indices] = host.k_buffer[layer_id][host_indices]
    host.device_v_buffers[layer_id][device_indices] = host.v_buffer[layer_id][host_indices]


def save_layers(
    host: MHATokenToKVPoolHost,
    device_pool: MHATokenToKVPool,
    host_indices: Tensor,
    device_indices: Tensor,
    io_backend: str,
) -> None:
    """Copy all layers' keys and values of some tokens to the host pool; arguments as in :func:`load_layer`."""
    _check(host, io_backend)
    for saved, layers in ((host.k_buffer, host.device_k_buffers), (host.v_buffer, host.device_v_buffers)):
        for layer_id, layer in enumerate(layers):
            saved[layer_id][host_indices] = layer[device_indices]


def send_kv_chunk(original: Callable, scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any) -> None:
    """AROUND `Scheduler._send_kv_chunk`: send page numbers that are on the host already."""
    req.disagg_kv_sender.supports_host_tensor_indices = False
    original(scheduler, req, *args, **kwargs)


def _check(host: MHATokenToKVPoolHost, io_backend: str) -> None:
    if io_backend != "direct" or host.layout != "layer_first":
        raise ValueError(
            f"--hicache-io-backend {io_backend} --hicache-mem-layout {host.layout}: a CPU has only direct and "
            "layer_first."
        )
