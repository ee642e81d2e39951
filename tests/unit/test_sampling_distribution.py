"""Sampled continuations have the target's distribution, with any drafts.

The target is a table of logits, so the distribution of the first tokens is known exactly. The sampler is SGLang's own,
called by `FallbackSampler` and followed by `accept_prefix`, as in the worker's cycle. Batches that the cycle samples
itself use the cycle's sampler, and trees use `accept_paths`.
"""

from __future__ import annotations

import random
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from support.sampled import FIRST, NUM_NEW, SETTINGS, STOP, TABLE, VOCAB, p_value
from torch.profiler import profile

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("samples on the CPU", allow_module_level=True)

from sglang.srt.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from sglang.srt.layers import sampler as srt_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, create_sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from models.tiny import TARGET_DIR
from sglang_dflash import ops
from sglang_dflash.memory import pool_sizing
from sglang_dflash.ops.bigrams import TABLE_SIZE
from sglang_dflash.types import Acceptance, DrawParameters, Trees
from sglang_dflash.verify import fast_path, sampler
from sglang_dflash.verify.fast_path import draw_parameters
from sglang_dflash.verify.request_keys import RequestKeys
from sglang_dflash.verify.sampler import FallbackSampler, sampler_bytes

# `FallbackSampler` uses a hook of SGLang's sampler to learn which tokens could not be sampled.
load_plugins()

BLOCK_SIZE = 4
NUM_CONTINUATIONS = 200_000
NUM_NODES, NUM_CANDIDATES, NUM_TREES = 8, 3, 256


@pytest.fixture(scope="module", autouse=True)
def context(tmp_path_factory):
    """Publish what SGLang's sampler reads of a server, until the tests end."""
    store = tmp_path_factory.mktemp("store") / "store"
    args = ServerArgs(model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native", dtype="float32")
    with use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0))):
        init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
        )
        initialize_model_parallel(backend="gloo")
        yield


def request(params: dict) -> Req:
    req = Req("rid", "", [0, 1], SamplingParams(max_new_tokens=9, **params))
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP)
    return req


def batch_of(reqs: list[Req]) -> ScheduleBatch:
    batch = ScheduleBatch(reqs=reqs, device="cpu")
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB).copy_for_forward()
    return batch


def fallback_sampler(num_slots: int, sampler: Sampler | None = None) -> FallbackSampler:
    runner = SimpleNamespace(
        sampler=create_sampler() if sampler is None else sampler,
        model_config=SimpleNamespace(vocab_size=VOCAB),
        device="cpu",
    )
    keys = RequestKeys(num_slots, "cpu", random.Random(0))
    return FallbackSampler(runner, num_slots, get_tp_group(), keys)


def step_of(block: torch.Tensor, positions: torch.Tensor, output: LogitsProcessorOutput, seq_lens: torch.Tensor):
    """A cycle that has run, before SGLang's sampler chooses."""
    return SimpleNamespace(
        block_tokens=block,
        positions=positions,
        target_output=output,
        grammar_tree=None,
        seq_lens=seq_lens,
        accepted=Acceptance.empty(*block.shape, block.device),
    )


class AcceptingCycle:
    """Accepts tokens as `DecodeCycle` does.

    Attributes:
        bias: the share of blocks whose first draft token is kept without asking.
    """

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = bias
        self.parts: list[list[int]] = []

    def accept_fallback(self, step, index: torch.Tensor, target: torch.Tensor) -> None:
        self.parts.append(index.tolist())
        block = step.block_tokens[index]
        target[:, 0] = torch.where(torch.rand(len(index)) < self.bias, block[:, 1], target[:, 0])
        step.accepted.put(index, ops.accept_prefix(block, target, step.seq_lens[index]))


def continuations(params: dict, bias: float = 0.0, in_cycle: bool = False) -> torch.Tensor:
    """Return tokens [NUM_CONTINUATIONS, NUM_NEW] after `FIRST`.

    Args:
        params: sampling parameters.
        bias: share of continuations whose first draft is accepted without a check.
        in_cycle: sample as the cycle does for batches on the fast path.
    """
    torch.manual_seed(0)
    n = NUM_CONTINUATIONS
    req = request(params)
    batch = batch_of([req] * n)
    batch.req_pool_indices = torch.arange(n)
    batch.seq_lens = torch.full((n,), len(req.origin_input_ids))
    sampler = fallback_sampler(n)
    sampler.prepare_prefill(batch)
    bonus = torch.full((n,), FIRST)
    sampler.begin_requests(batch, bonus)
    tokens = torch.zeros(n, NUM_NEW + BLOCK_SIZE, dtype=torch.int64)
    rows, keys = torch.arange(BLOCK_SIZE), torch.randint(0, 2**62, (n,))
    for _ in range(NUM_NEW):
        block = bonus[:, None].repeat(1, BLOCK_SIZE)
        for j in range(1, BLOCK_SIZE):
            by_rank = TABLE.argsort(dim=1, descending=True)[block[:, j - 1]]
            # Good drafts, bad ones, and some in between.
            rank = torch.tensor([0, 0, 0, VOCAB - 1, VOCAB - 1, 1, 2])[torch.randint(7, (n,))]
            block[:, j] = by_rank.gather(1, rank[:, None]).squeeze(1)
        output = LogitsProcessorOutput(next_token_logits=TABLE[block.view(-1)].float())
        positions = batch.seq_lens[:, None] + rows
        if in_cycle:
            maxima, target = ops.row_max(output.next_token_logits)
            parameters = draw_parameters(batch.sampling_info)
            ops.sample_rows(output.next_token_logits, maxima, target, parameters, keys, positions.view(-1))
            accepted = ops.accept_prefix(block, target.view(n, BLOCK_SIZE), batch.seq_lens)
        else:
            step = step_of(block, positions, output, batch.seq_lens)
            sampler.resolve(batch, list(range(n)), step, AcceptingCycle(bias), None)
            accepted = step.accepted
        done = (batch.seq_lens - len(req.origin_input_ids)).clamp(max=NUM_NEW)
        tokens.scatter_(1, done[:, None] + rows, accepted.out_tokens)
        bonus, batch.seq_lens = accepted.bonus_tokens, accepted.new_seq_lens
    return tokens[:, :NUM_NEW]


def random_trees() -> Trees:
    """Return trees of the most probable paths of random drafters; one of ten is a chain."""
    logits, candidates = torch.randn(NUM_TREES, BLOCK_SIZE - 1, VOCAB).mul(2).sort(dim=-1, descending=True)
    zeros = torch.zeros(NUM_TREES, dtype=torch.int64)
    trees = Trees.empty(NUM_TREES, NUM_NODES, "cpu")
    is_chain = (torch.arange(NUM_TREES) % 10 == 0).long()
    candidates = candidates[:, :, :NUM_CANDIDATES].contiguous()
    table = ops.fill_table(
        candidates,
        logits[:, :, :NUM_CANDIDATES].contiguous(),
        logits.logsumexp(dim=-1),
        DrawParameters.greedy(NUM_TREES, "cpu"),
        zeros,
        torch.zeros(1, TABLE_SIZE, dtype=torch.int16),
        is_chain,
        zeros,
        zeros,
    )
    ops.grow_trees(
        zeros,
        candidates,
        *table,
        is_chain,
        zeros,
        zeros,
        torch.zeros(1, NUM_NODES, dtype=torch.int32),
        trees,
    )
    return trees


def continuations_of_trees(params: dict, bias: float = 0.0) -> tuple[torch.Tensor, float]:
    """Return tokens as `continuations` does in the cycle, and the share of accepted drafts that are not in a chain."""
    torch.manual_seed(0)
    n, trees = NUM_CONTINUATIONS, random_trees()
    parameters = draw_parameters(batch_of([request(params)] * n).sampling_info)
    bonus, done = torch.full((n,), FIRST), torch.zeros(n, dtype=torch.int64)
    tokens = torch.zeros(n, NUM_NEW + BLOCK_SIZE, dtype=torch.int64)
    num_drafts = num_others = 0
    keys = torch.randint(0, 2**62, (n,))
    for _ in range(NUM_NEW):
        which = torch.randint(NUM_TREES, (n,))
        nodes, parents = trees.tokens.view(NUM_TREES, NUM_NODES)[which], trees.parents[which]
        nodes[:, 0] = bonus
        logits = TABLE[nodes.view(-1)].float()
        maxima, target = ops.row_max(logits)
        positions = (trees.positions.view(NUM_TREES, NUM_NODES)[which] + done[:, None]).view(-1)
        ops.sample_rows(logits, maxima, target, parameters, keys, positions)
        target = target.view(n, NUM_NODES)
        target[:, 0] = torch.where(torch.rand(n) < bias, nodes[:, 1], target[:, 0])
        accepted, paths = ops.accept_paths(nodes, parents, target, done, BLOCK_SIZE)
        is_draft = (torch.arange(BLOCK_SIZE) < accepted.accept_lens[:, None])[:, 1:]
        num_drafts += int(is_draft.sum())
        num_others += int((is_draft & (paths[:, 1:] != 1 + paths[:, :-1])).sum())
        tokens.scatter_(1, done.clamp(max=NUM_NEW)[:, None] + torch.arange(BLOCK_SIZE), accepted.out_tokens)
        bonus, done = accepted.bonus_tokens, accepted.new_seq_lens
    return tokens[:, :NUM_NEW], num_others / num_drafts


@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.5", "top_p", "top_k and top_p"])
def test_distribution_of_trees(name):
    tokens, share = continuations_of_trees(SETTINGS[name])

    assert p_value(SETTINGS[name], tokens) > 0.001
    assert share > 0.2


def test_a_bias_of_one_percent_of_trees_is_seen():
    assert p_value(SETTINGS["temperature 1"], continuations_of_trees(SETTINGS["temperature 1"], bias=0.01)[0]) < 0.001


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name])) > 0.001


@pytest.mark.parametrize("name", [name for name in SETTINGS if "penalt" not in name and "bias" not in name])
def test_distribution_in_the_cycle(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name], in_cycle=True)) > 0.001


@pytest.mark.parametrize("name", ["temperature 1", "top_p", "penalties"])
def test_a_bias_of_one_percent_is_seen(name):
    assert p_value(SETTINGS[name], continuations(SETTINGS[name], bias=0.01)) < 0.001


# --- which requests the cycle chooses for -----------------------------------------------------------------------------


@pytest.fixture
def flashinfer(monkeypatch):
    """Use the sampling backend of a GPU."""
    on_gpu = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="flashinfer"))
    monkeypatch.setattr(fast_path, "get_exec", lambda: on_gpu)


GREEDY = {"temperature": 0}
# Requests of a batch, and the indices of those that need SGLang's sampler.
BATCHES = [
    ([GREEDY], []),
    ([{}], []),
    ([{"temperature": 0.5}, GREEDY], []),
    ([{"top_k": 3, "top_p": 0.9}], []),
    ([{"top_k": 3}, {"min_p": 0.1}], []),
    ([{"top_p": 0.9}, {"min_p": 0.1}], []),
    ([{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], []),
    ([{"top_k": 3, "top_p": 0.9, "min_p": 0.1}], [0]),
    ([{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, GREEDY], [1]),
    ([GREEDY | {"frequency_penalty": 0.5}], [0]),
    ([GREEDY, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}], [1, 2]),
    ([{"min_new_tokens": 2}, {}], [0]),
    ([{}, {"logit_bias": {"1": 2.0}}], [1]),
]


@pytest.mark.parametrize(("params", "fallback"), BATCHES)
def test_requests_that_need_the_fallback(params, fallback, flashinfer):
    assert fallback_sampler(1).needs_fallback(batch_of([request(one) for one in params])) == fallback


@pytest.mark.parametrize("params", [{}, GREEDY])
@pytest.mark.parametrize(
    ("of_request", "value", "of_batch"),
    [
        ("return_logprob", True, "return_logprob"),
        ("grammar", object(), "has_grammar"),
        ("custom_logit_processor", "processor", None),
    ],
)
def test_what_the_host_has_to_see_needs_the_fallback(params, of_request, value, of_batch, flashinfer):
    batch = batch_of([request(params), request(params)])
    setattr(batch.reqs[1], of_request, value)
    setattr(batch if of_batch else batch.sampling_info, of_batch or "has_custom_logit_processor", True)
    assert fallback_sampler(1).needs_fallback(batch) == [1]


def test_seeded_draws_need_the_fallback(flashinfer):
    batch = batch_of([request(GREEDY), request({})])
    batch.sampling_info.sampling_seed = torch.tensor([1, 2])
    assert fallback_sampler(1).needs_fallback(batch) == [1]
    assert fallback_sampler(1).draw_parameters(batch.sampling_info) is None


def test_another_sampler_draws_for_itself(flashinfer):
    class Custom(Sampler):
        pass

    on_policy = Sampler()
    on_policy.rl_on_policy_target = "fsdp"
    for other in (Custom(), on_policy):
        assert fallback_sampler(1, other).needs_fallback(batch_of([request({}), request(GREEDY)])) == [0]


def test_other_backends_draw_by_other_rules(monkeypatch):
    other = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="intel_xpu"))
    monkeypatch.setattr(fast_path, "get_exec", lambda: other)
    sampler = fallback_sampler(1)
    assert sampler.needs_fallback(batch_of([request({}), request(GREEDY)])) == [0]
    assert sampler.needs_fallback(batch_of([request(GREEDY)])) == []


def test_parts_are_bounded(monkeypatch):
    """The sampler gets whole requests, at most as many as fit into its bytes, and at least one."""
    n, fallback = 9, [0, 1, 3, 4, 5, 8]
    batch = batch_of([request({})] * n)
    batch.seq_lens = torch.full((n,), 2)
    block = torch.zeros((n, BLOCK_SIZE), dtype=torch.int64)
    sizes = {}
    for num_bytes in (1, sampler_bytes(VOCAB, BLOCK_SIZE), 4 * sampler_bytes(VOCAB, BLOCK_SIZE) + 1, 1 << 30):
        monkeypatch.setattr(sampler, "SAMPLER_BYTES", num_bytes)
        output = LogitsProcessorOutput(torch.randn(block.numel(), VOCAB))
        cycle = AcceptingCycle()
        resolved = fallback_sampler(1).resolve(
            batch, fallback, step_of(block, block, output, batch.seq_lens), cycle, None
        )
        assert [i for part in cycle.parts for i in part] == fallback
        assert [part.tolist() for part in resolved.parts] == cycle.parts
        sizes[num_bytes] = [len(part) for part in cycle.parts]
    assert list(sizes.values()) == [[1] * 6, [1] * 6, [4, 2], [6]]


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("params", [GREEDY, {}, {"top_p": 0.9}, {"top_p": 0.9, "frequency_penalty": 0.5}], ids=str)
def test_the_memory_of_the_sampler_is_counted(params, is_seeded, monkeypatch):
    n, vocab_size = 4, 20_000
    monkeypatch.setattr(sys.modules[__name__], "VOCAB", vocab_size)
    reqs = [request(params) for _ in range(n)]
    for req in reqs:
        req.return_logprob, req.logprob.top_logprobs_num = True, 5
    batch = batch_of(reqs)
    batch.req_pool_indices, batch.seq_lens = torch.arange(n), torch.full((n,), 2)
    batch.return_logprob = True
    if is_seeded:
        batch.sampling_info.sampling_seed = torch.arange(n)
        # On a GPU this is one kernel.
        hashed = torch.randint(2**32, (n * BLOCK_SIZE, 1)).to(torch.uint32)
        monkeypatch.setattr(srt_sampler, "murmur_hash32", lambda *_: hashed.repeat(1, vocab_size))
    sampler = fallback_sampler(n)
    sampler._sampler.enable_deterministic = is_seeded
    output = LogitsProcessorOutput(torch.randn(n * BLOCK_SIZE, vocab_size, dtype=torch.bfloat16))
    block = torch.randint(vocab_size, (n, BLOCK_SIZE))
    step = step_of(block, torch.arange(block.numel()).view_as(block), output, batch.seq_lens)

    with torch.compiler.set_stance("force_eager"), profile(profile_memory=True) as profiler:
        sampler.resolve(batch, list(range(n)), step, AcceptingCycle(), None)

    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak = max(accumulate(sizes)) / (n * sampler_bytes(vocab_size, BLOCK_SIZE))
    bound = pool_sizing.SEEDED_SAMPLER_COPIES if is_seeded else pool_sizing.SAMPLER_COPIES
    assert 1 <= peak <= bound, peak
