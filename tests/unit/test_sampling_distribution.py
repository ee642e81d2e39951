"""Sampled continuations have the target's distribution, whatever is drafted.

The target is a table of logits, so the distribution of the first tokens is known exactly; the sampler is SGLang's own,
behind `BlockSampler` and `accept_prefix`, as in the worker's cycle.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("samples on the CPU", allow_module_level=True)

from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
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

VOCAB, BLOCK_SIZE, NUM_NEW = 5, 4, 3
NUM_CONTINUATIONS = 200_000
FIRST, STOP = 2, 4
# Logits after each token: far from uniform, no two equal.
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    "top_p and min_p": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    "repetition, bias and stop": {
        "repetition_penalty": 1.7,
        "logit_bias": {"1": 0.8},
        "min_new_tokens": 3,
        "stop_token_ids": [STOP],
    },
}


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
        )
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


def next_distribution(params: dict, generated: list[int]) -> torch.Tensor:
    """[V] float64, written from SGLang's documentation of its parameters and not from its code."""
    logits = TABLE[generated[-1]].clone()
    counts = torch.bincount(torch.tensor(generated), minlength=VOCAB)
    logits -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * (counts > 0)
    if len(generated) < params.get("min_new_tokens", 0):
        logits[STOP] = -torch.inf
    repetition = params.get("repetition_penalty", 1)
    logits = torch.where(counts > 0, torch.where(logits < 0, logits * repetition, logits / repetition), logits)
    for token, value in params.get("logit_bias", {}).items():
        logits[int(token)] += value
    probs = (logits / params.get("temperature", 1)).softmax(dim=0)
    order = probs.argsort(descending=True)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    mass = 0.0
    for rank, token in enumerate(order.tolist()):
        likely = probs[token] >= params.get("min_p", 0) * probs.max()
        kept[token] = rank < params.get("top_k", VOCAB) and mass <= params.get("top_p", 1) and likely
        mass += float(probs[token])
    probs[~kept] = 0
    return probs / probs.sum()


def p_value(params: dict, tokens: torch.Tensor) -> float:
    """Pearson's chi-square test of the tokens against the exact distribution."""
    expected, observed = [], []
    rest_expected = rest_observed = 0.0
    code = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    counts = torch.bincount(code, minlength=VOCAB**3)
    for i, sequence in enumerate(product(range(VOCAB), repeat=NUM_NEW)):
        history, probability = [FIRST], 1.0
        for token in sequence:
            probability *= float(next_distribution(params, history)[token])
            history.append(token)
        if probability == 0:
            if counts[i]:
                return 0.0
        elif probability * NUM_CONTINUATIONS < 10:
            rest_expected += probability * NUM_CONTINUATIONS
            rest_observed += int(counts[i])
        else:
            expected.append(probability * NUM_CONTINUATIONS)
            observed.append(int(counts[i]))
    if rest_expected:
        expected.append(rest_expected)
        observed.append(rest_observed)
    expected, observed = torch.tensor(expected).double(), torch.tensor(observed).double()
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name])) > 0.001


@pytest.mark.parametrize("name", ["temperature 1", "top_p", "penalties"])
def test_a_bias_of_one_percent_is_seen(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name], bias=0.01)) < 0.001
