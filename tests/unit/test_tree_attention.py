"""Targets whose trees cannot be verified on a GPU, which need not be there."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from support.gpus import GPUS, KIB
from torch import nn

from sglang_dflash.attention.trees import memory_obstacle
from sglang_dflash.ops.kernels import attend_trees

NUM_NODES = 16
# Query heads, KV heads, numbers of a key and of a value.
SHAPES = {
    "Qwen3-8B": (32, 8, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "Qwen3.5": (16, 4, 256, 256),
    "DeepSeek V3": (128, 1, 576, 512),
    "GLM-4 lite": (20, 1, 576, 512),
    "Gemma 4": (32, 4, 512, 512),
}


def target(heads: int, kv_heads: int, key_size: int, value_size: int) -> SimpleNamespace:
    """A model runner whose KV pool has one slot."""
    caches = [torch.empty(1, kv_heads, size) for size in (key_size, value_size)]
    if key_size == 576:
        # Latent attention.
        caches[1] = caches[0][..., :value_size]
    pool = SimpleNamespace(get_key_buffer=lambda layer: caches[0], get_value_buffer=lambda layer: caches[1])
    model = nn.ModuleDict({"attn": RadixAttention(heads, key_size, 1.0, kv_heads, 0, v_head_dim=value_size)})
    return SimpleNamespace(model=model, token_to_kv_pool=pool, dtype=torch.bfloat16)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_served_shape_fits_every_gpu(monkeypatch, gpu, shape):
    monkeypatch.setattr(attend_trees, "_shared_memory", lambda device: gpu.shared_memory)
    assert memory_obstacle(target(*shape), NUM_NODES) is None
    layout = attend_trees._Layout.of(NUM_NODES, *shape, torch.bfloat16)
    tile, _ = layout.fitting_tile(shape[2] == 576, torch.bfloat16, torch.device("cpu"))
    # Chunks are cut by the tuned tile.
    assert layout.tile.keys % tile.keys == 0 and tile.rows == layout.tile.rows
    if gpu.shared_memory > 100 * KIB:
        assert tile == layout.tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 64), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_a_hopper_gpu_has_room_for_every_tuned_tile(key_size, value_size, dtype):
    for group in (1, 4, 16, 128):
        layout = attend_trees._Layout.of(64, group, 1, key_size, value_size, dtype)
        tile, needed = layout.fitting_tile(False, dtype, torch.device("cpu"))
        assert tile == layout.tile and needed <= attend_trees.SHARED_MEMORY


def test_layer_that_does_not_fit_is_named(monkeypatch):
    monkeypatch.setattr(attend_trees, "_shared_memory", lambda device: 99 << 10)
    assert memory_obstacle(target(32, 4, 2048, 2048), NUM_NODES) == (
        "in layer attn of the target heads of 2048 and 2048 numbers need 193 KiB of shared memory, and this GPU has 99"
    )
