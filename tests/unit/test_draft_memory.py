"""Memory of drafts in a cycle: the bytes that are counted equal the bytes of the tensors that are allocated."""

import json
import multiprocessing
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

import sglang.srt.utils  # noqa: F401  (SGLang's import order: utils before the layers)
from sglang.srt.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from support.peak_memory import PeakMemory

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.draft_memory import DraftMemory
from sglang_dflash.draft.convolutions import BlockConvolution
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.pairs import build_pairs
from sglang_dflash.inspect import read_drafter
from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE
from sglang_dflash.types import Block

REQUESTS, NUM_CANDIDATES, DTYPE = 3, 8, torch.bfloat16
ZLAB = json.loads((DRAFTER_DIR / "config.json").read_text())
INNER = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
DEEPSPEC = ZLAB | ZLAB["dflash_config"] | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6}
DRAFTERS = {
    "no parts": ZLAB,
    "selector": ZLAB | {"dflash_config": ZLAB["dflash_config"] | INNER},
    "vanilla": DEEPSPEC | {"markov_head_type": "vanilla"},
    "gated": DEEPSPEC | {"markov_head_type": "gated"},
}


def measure(config: DFlashConfig, num_candidates: int) -> DraftMemory:
    """Return the bytes of all requests that drafts of the whole block allocate."""
    num_drafts, hidden_size = config.block_size - 1, config.hidden_size
    pairs = None
    if config.pairs is not None:
        _, pairs = build_pairs(config.pairs, hidden_size, config.vocab_size, "")
        for parameter in pairs.parameters():
            parameter.data = torch.rand_like(parameter)
        num_candidates = config.pairs.num_candidates
    lm_head = ParallelLMHead(config.vocab_size, hidden_size, params_dtype=DTYPE)
    lm_head.weight.data = torch.rand_like(lm_head.weight)
    head = DraftHead(
        lm_head, get_tp_group(), num_candidates, predicts_from_anchor=config.predicts_from_anchor, pairs=pairs
    )
    rows = config.draft_rows(config.block_size)
    hidden_states = torch.rand(REQUESTS * rows, hidden_size, dtype=DTYPE)
    block = Block.of(*torch.zeros(3, REQUESTS * rows, dtype=torch.int64), *torch.zeros(2, REQUESTS, dtype=torch.int64))
    table = head.table(hidden_states, block, torch.zeros(1, TABLE_SIZE, dtype=TABLE_DTYPE))
    candidates, logits, _ = head.candidates(hidden_states, REQUESTS)
    of_table = sum(tensor.nbytes for tensor in (*table, logits))

    of_pairs = of_convolutions = 0
    predicting = hidden_states.unflatten(0, (REQUESTS, -1))[:, -num_drafts:].contiguous()
    bonus_tokens = torch.zeros(REQUESTS, dtype=torch.int64)
    if pairs is not None:
        with PeakMemory(predicting, bonus_tokens, candidates, *pairs.parameters()) as memory:
            pairs(predicting, bonus_tokens, candidates)
        of_pairs = memory.peak
    if config.conv is not None:
        convolution = BlockConvolution(config.conv, hidden_size, "")
        weights = convolution.row_weights(hidden_states)
        of_convolutions = weights.nbytes + convolution.before(hidden_states, weights, rows).nbytes
    return DraftMemory(of_table, of_pairs, of_convolutions)


def measure_all(configs: dict[str, DFlashConfig], folder: Path) -> None:
    """Write what all drafters allocate, from a process of its own, because SGLang's configuration is global."""
    torch.set_grad_enabled(False)
    torch.set_default_dtype(DTYPE)
    args = ServerArgs(model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native", dtype="bfloat16")
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder}/init"
    )
    initialize_model_parallel(backend="gloo")
    measured = {name: asdict(measure(config, NUM_CANDIDATES)) for name, config in configs.items()}
    (folder / "measured.json").write_text(json.dumps(measured))


def test_bytes_are_those_of_the_tensors(tmp_path):
    configs = {}
    for name, config in DRAFTERS.items():
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        configs[name], _ = read_drafter(str(path))
    process = multiprocessing.get_context("fork").Process(target=measure_all, args=(configs, tmp_path))
    process.start()
    process.join(timeout=120)
    process.kill()
    assert process.exitcode == 0
    measured = json.loads((tmp_path / "measured.json").read_text())
    for name, config in configs.items():
        counted = asdict(DraftMemory.of(config, config.block_size, NUM_CANDIDATES, DTYPE.itemsize))
        assert {part: REQUESTS * num_bytes for part, num_bytes in counted.items()} == measured[name], name
