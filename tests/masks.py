"""Run blocks of drafter queries through an attention backend of SGLang, and write how far off every mask is.

A program of its own, since SGLang keeps state per process.
usage: masks.py BACKEND DTYPE PAGE_SIZE HEADS KV_HEADS HEAD_DIM OUTPUT

OUTPUT becomes a JSON object: mask -> largest error (see `Blocks.error`). Masks that begin with `refused: ` are not
served on this backend; those that begin with `in-tree: ` are drawn without this package's hook.
"""

import json
import sys
from pathlib import Path

import torch
from attention_reference import dense_attention
from sglang.srt.plugins import load_plugins

from sglang_dflash.tiny_pair import DRAFTER_DIR, TARGET_DIR

BLOCK_SIZE = 16
# Shorter than the block; no multiple of a page.
WINDOWS = [8, 50]
# Shorter than the second window, equal to it, one longer, far longer.
CONTEXT_LENS = [1, 49, 50, 51, 200, 16]


def model_runner(backend: str, dtype: str, page_size: int, heads: int, kv_heads: int, head_dim: int):
    """SGLang's own, of a target with dummy weights and this geometry."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import PortArgs, ServerArgs

    geometry = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    server_args = ServerArgs(
        model_path=str(TARGET_DIR),
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        load_format="dummy",
        json_model_override_args=json.dumps(geometry),
        attention_backend=backend,
        page_size=page_size,
        max_total_tokens=4096,
        max_running_requests=16,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(DRAFTER_DIR),
    )
    get_context().set_server_args(server_args)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=0,
        ps=ParallelState.trivial(),
        nccl_port=PortArgs.init_new(server_args).nccl_port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    return runner


class Blocks:
    """A batch of requests with context KV in scattered pages, and a block's queries, keys and values after it."""

    def __init__(self, runner, page_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(runner.device, runner.dtype)

        self.runner, self.heads, self.kv_heads, self.head_dim = runner, heads, kv_heads, head_dim
        # Short queries weigh all keys alike, so one key too many or too few shows.
        self.queries = [0.2 * randn(BLOCK_SIZE, heads, head_dim) for _ in CONTEXT_LENS]
        self.keys = [randn(length + BLOCK_SIZE, kv_heads, head_dim) for length in CONTEXT_LENS]
        self.values = [randn(length + BLOCK_SIZE, kv_heads, head_dim) for length in CONTEXT_LENS]
        # Page 0 is for padding.
        pages = torch.randperm(4096 // page_size - 1, generator=generator) + 1
        self.slots = []
        for row, length in enumerate(CONTEXT_LENS):
            num_pages = -(-(length + BLOCK_SIZE) // page_size)
            slots = (pages[:num_pages, None] * page_size + torch.arange(page_size)).flatten()[: length + BLOCK_SIZE]
            pages = pages[num_pages:]
            self.slots.append(slots.to(runner.device))
            runner.req_to_token_pool.req_to_token[row + 1, : length + BLOCK_SIZE] = self.slots[-1].to(torch.int32)

    def error(self, backend, window: int | None, causal: bool) -> float:
        """The largest difference of an output to the reference, relative to the largest of its row and head.

        Outputs of a row that sees few keys are large, and so is their rounding; a key more or less moves them further.
        """
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        from sglang_dflash.info import DFlashVerifyInput

        scale = self.head_dim**-0.5
        layer = RadixAttention(
            self.heads,
            self.head_dim,
            scale,
            self.kv_heads,
            layer_id=0,
            sliding_window_size=-1 if window is None else window - 1,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )
        pool, device = self.runner.token_to_kv_pool, self.runner.device
        # Whoever reads beyond a request's keys, or leaves a block's unwritten, shall not get away with it.
        pool.get_key_buffer(0).fill_(100.0)
        pool.get_value_buffer(0).fill_(100.0)
        for slots, keys, values in zip(self.slots, self.keys, self.values):
            pool.get_key_buffer(0)[slots[:-BLOCK_SIZE]] = keys[:-BLOCK_SIZE]
            pool.get_value_buffer(0)[slots[:-BLOCK_SIZE]] = values[:-BLOCK_SIZE]
        lens = torch.tensor(CONTEXT_LENS)
        positions = torch.cat([torch.arange(length, length + BLOCK_SIZE) for length in CONTEXT_LENS])
        # As the worker fills it in: lengths on the CPU count the block.
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(lens),
            input_ids=torch.zeros_like(positions).to(device),
            req_pool_indices=torch.arange(1, len(lens) + 1, device=device),
            seq_lens=lens.to(device),
            seq_lens_cpu=lens + BLOCK_SIZE,
            seq_lens_sum=int((lens + BLOCK_SIZE).sum()),
            out_cache_loc=torch.cat([slots[-BLOCK_SIZE:] for slots in self.slots]),
            positions=positions.to(device),
            spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK_SIZE),
        )
        backend.init_forward_metadata(batch)
        keys, values = (torch.cat([x[-BLOCK_SIZE:] for x in each]) for each in (self.keys, self.values))
        output = backend.forward(torch.cat(self.queries).flatten(1), keys, values, layer, batch)
        expected = torch.cat(
            [
                dense_attention(q, k, v, window=window, causal=causal, scale=scale)
                for q, k, v in zip(self.queries, self.keys, self.values)
            ]
        )
        difference = (output.view_as(expected).double() - expected).abs()
        return float((difference.amax(-1) / expected.abs().amax(-1)).max())


def main(name: str, dtype: str, page_size: int, *geometry: int, output: str) -> None:
    load_plugins()
    runner = model_runner(name, dtype, page_size, *geometry)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_dflash.config import TWO_SIDED_BACKENDS

    blocks = Blocks(runner, page_size, *geometry)
    errors = {}
    for window in WINDOWS:
        runner.sliding_window_size = window - 1
        backend = ATTENTION_BACKENDS[name](runner)
        for causal in (False, True):
            # Layers of both kinds share a backend.
            errors[f"full, causal={causal}, beside {window}"] = blocks.error(backend, None, causal)
            served = causal or window >= BLOCK_SIZE or name in TWO_SIDED_BACKENDS
            errors[f"{'' if served else 'refused: '}sliding {window}, causal={causal}"] = blocks.error(
                backend, window, causal
            )
        if name == "flashinfer":
            from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill as Updater

            hooked, Updater.call_begin_forward = Updater.call_begin_forward, Updater.call_begin_forward.__wrapped__
            errors[f"in-tree: sliding {window}, causal=True"] = blocks.error(backend, window, causal=True)
            Updater.call_begin_forward = hooked
    Path(output).write_text(json.dumps(errors))


if __name__ == "__main__":
    backend, dtype, *numbers, output = sys.argv[1:]
    main(backend, dtype, *map(int, numbers), output=output)
