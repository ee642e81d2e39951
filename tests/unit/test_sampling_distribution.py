"""Sampled continuations have the target's distribution, whatever is drafted.

The target is a table of logits, so the distribution of the first tokens is known exactly; the sampler is SGLang's own,
behind `BlockSampler` and `accept_prefix`, as in the worker's cycle.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sampled import FIRST, NUM_NEW, SETTINGS, STOP, TABLE, VOCAB, p_value

from sglang_dflash.cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("samples on the CPU", allow_module_level=True)

from sglang.srt.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import create_sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_dflash import ops
from sglang_dflash.sampling import BlockSampler
from sglang_dflash.tiny_pair import TARGET_DIR

BLOCK_SIZE = 4
NUM_CONTINUATIONS = 200_000


@pytest.fixture(scope="module", autouse=True)
def context(tmp_path_factory):
    """What SGLang's sampler reads of a server; set back afterwards."""
    store = tmp_path_factory.mktemp("store") / "store"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
    )
    initialize_model_parallel()
    with get_context().preserve_config():
        args = ServerArgs(model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native")
        get_context().set_server_args(args)
        yield


def continuations(params: dict, bias: float = 0.0) -> torch.Tensor:
    """[NUM_CONTINUATIONS, NUM_NEW] tokens behind `FIRST`.

    Args:
        bias: the share of continuations whose first draft token is kept without asking.
    """
    torch.manual_seed(0)
    n = NUM_CONTINUATIONS
    req = Req("rid", "", [0, 1], SamplingParams(max_new_tokens=9, **params))
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP)
    batch = ScheduleBatch(reqs=[req] * n, device="cpu")
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB).copy_for_forward()
    batch.req_pool_indices = torch.arange(n)
    batch.seq_lens = torch.full((n,), len(req.origin_input_ids))
    sampler = BlockSampler(
        SimpleNamespace(
            sampler=create_sampler(),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(n, 0)),
            model_config=SimpleNamespace(vocab_size=VOCAB),
            device="cpu",
        ),
        get_tp_group(),
    )
    sampler.begin_prefill(batch)
    bonus = torch.full((n,), FIRST)
    sampler.end_prefill(batch, bonus)
    tokens = torch.zeros(n, NUM_NEW + BLOCK_SIZE, dtype=torch.int64)
    rows = torch.arange(BLOCK_SIZE)
    for _ in range(NUM_NEW):
        block = bonus[:, None].repeat(1, BLOCK_SIZE)
        for j in range(1, BLOCK_SIZE):
            by_rank = TABLE.argsort(dim=1, descending=True)[block[:, j - 1]]
            # Good drafts, bad ones, and some in between.
            rank = torch.tensor([0, 0, 0, VOCAB - 1, VOCAB - 1, 1, 2])[torch.randint(7, (n,))]
            block[:, j] = by_rank.gather(1, rank[:, None]).squeeze(1)
        output = LogitsProcessorOutput(next_token_logits=TABLE[block.view(-1)].float())
        positions = (batch.seq_lens[:, None] + rows).view(-1)
        target = sampler(batch, output, block, positions, None, None)
        target[:, 0] = torch.where(torch.rand(n) < bias, block[:, 1], target[:, 0])
        accepted = ops.accept_prefix(block, target, batch.seq_lens)
        sampler.end_cycle(batch, accepted)
        done = (batch.seq_lens - len(req.origin_input_ids)).clamp(max=NUM_NEW)
        tokens.scatter_(1, done[:, None] + rows, accepted.out_tokens)
        bonus, batch.seq_lens = accepted.bonus_tokens, accepted.new_seq_lens
    return tokens[:, :NUM_NEW]


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name])) > 0.001


@pytest.mark.parametrize("name", ["temperature 1", "top_p", "penalties"])
def test_a_bias_of_one_percent_is_seen(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name], bias=0.01)) < 0.001
