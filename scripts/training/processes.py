"""Processes of one host that train together, one GPU each (`torchrun`). A single process needs no special case."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def join(device: str) -> None:
    """Join the other processes if `torchrun` started this one. Each takes the GPU of its rank."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank())


def leave() -> None:
    """Leave the group that :func:`join` joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    """Wait until all processes have called this."""
    if dist.is_initialized():
        dist.barrier()


def first_says(value: float) -> float:
    """Return the first process's value, so that all processes take decisions by a clock alike."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: object) -> list:
    """Return every process's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * count()
    dist.all_gather_object(values, value)
    return values


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over the processes, in one all-reduce."""
    if not dist.is_initialized():
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def average(value: Tensor) -> Tensor:
    """Return the mean over the processes of a tensor on the training's device."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / count()
    return value
