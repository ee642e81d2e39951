"""Append a long prompt to a drafter's context in chunks and in one piece, and write how much the two differ.

It is a program because SGLang keeps state per process.
usage: append_prompt.py DRAFTER DTYPE TOKENS OUTPUT

DRAFTER is a folder with a `config.json`; the weights are random. OUTPUT becomes a JSON object:
    error: largest difference of a slot's keys or values, relative to their norm.
    chunks: number of chunks of each way.
    peak_bytes: memory of each way on a GPU without the features; None on a CPU.
On a GPU the program fails if the host waits for the GPU.
"""

import json
import sys
from pathlib import Path

import torch
from sglang.srt.plugins import load_plugins
from support.masks import model_runner


def build(folder: str, dtype: torch.dtype, rows: int):
    """Return a context writer with its own drafter and pool. The runner only provides what SGLang's layers need."""
    backend = "triton" if torch.cuda.is_available() else "torch_native"
    device = model_runner(backend, str(dtype).removeprefix("torch."), 1, 8, 2, 128).device
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_dflash.draft.context import ContextWriter
    from sglang_dflash.draft.model import DFlashDraftModel

    with set_default_torch_dtype(dtype), torch.device(device):
        model = DFlashDraftModel(get_config(folder, trust_remote_code=False))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    attention = model.layers[0].self_attn
    pool = MHATokenToKVPool(
        size=rows + 64,
        page_size=1,
        dtype=dtype,
        head_num=attention.num_kv_heads,
        head_dim=attention.head_dim,
        layer_num=len(model.layers),
        device=device,
        enable_memory_saver=False,
    )
    return ContextWriter(model, pool), pool, torch.randn(rows, model.num_features, device=device, dtype=dtype)


def append(writer, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> int | None:
    """Append, and return the peak of the memory that it takes, in bytes; None on a CPU."""
    if not features.is_cuda:
        writer.write(features, positions, slots)
        return None
    # The first call compiles and loads kernels, and allocates cuBLAS's workspace.
    writer.write(features, positions, slots)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        writer.write(features, positions, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.cuda.max_memory_allocated() - before


def main(folder: str, dtype: str, rows: str, output: str) -> None:
    load_plugins()
    torch.manual_seed(0)
    writer, pool, features = build(folder, getattr(torch, dtype), int(rows))
    from sglang_dflash.draft import context

    positions = torch.arange(len(features), device=features.device)
    slots = 1 + torch.randperm(pool.size, device=features.device)[: len(features)]
    contexts, peaks, chunks = [], [], []
    for chunk in (context.CONTEXT_TOKENS, len(features)):
        context.CONTEXT_TOKENS = chunk
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.zero_()
        peaks.append(append(writer, features, positions, slots))
        contexts.append([buffer.double().flatten(1) for buffer in (*pool.k_buffer, *pool.v_buffer)])
        chunks.append(-(-len(features) // chunk))
    # Slots that neither way has written are 0 in both.
    errors = [
        ((cut - whole).norm(dim=1) / whole.norm(dim=1).clamp(min=1e-20)).nan_to_num(torch.inf).max()
        for cut, whole in zip(*contexts, strict=True)
    ]
    assert all(int((whole.norm(dim=1) > 0).sum()) == len(features) for whole in contexts[1])
    result = {"error": float(max(errors)), "chunks": chunks, "peak_bytes": peaks}
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
