"""Best tokens over tensor-parallel ranks, of the drafter and the target, with SGLang's process groups and lm_head."""

import multiprocessing
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

import sglang.srt.utils  # noqa: F401  (SGLang's import order: utils before the layers)
from sglang.srt.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import nn

from models.tiny import TARGET_DIR
from sglang_dflash.draft import shortlist
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.ops import weight_copy
from sglang_dflash.verify import logits as verify_logits
from sglang_dflash.verify.logits import VerifyLogits, skip_lm_head
from sglang_dflash.vocab import bounded, copied
from sglang_dflash.vocab.argmax import VocabArgmax, pack, unpack

NUM_ROWS = 24
# (vocabulary, added tokens): one token, ranks without a token, a part that ends inside a shard, parts of any length.
VOCABULARIES = [(1, 0), (5, 0), (64, 0), (65, 0), (130, 0), (4096, 0), (1000, 1), (1010, 16), (129, 64), (200, 137)]
DTYPES = [torch.float32, torch.bfloat16]
WORLD_SIZES = [1, 2, 4]
# Candidates per row: more than some shards have, fewer than others have.
CANDIDATES = 16
# Candidates by a shortlist, of a vocabulary in which every rank's part has many groups.
SHORTLISTED, OF_VOCABULARY = 8, 4096
# Most rows whose logits are bounded, and a factor of the logits.
GREEDY = [(NUM_ROWS, None), (NUM_ROWS - 1, None), (NUM_ROWS, 2.0)]
# Attributes of a processor whose logits are no products with the lm_head, rounded to its dtype.
OTHER_LOGITS = [
    {"logit_scale": 2.0},
    {"final_logit_softcapping": 30.0},
    {"use_fp32_lm_head": True},
    {"use_fp32_lm_head_output": True},
    {"vocab_size": OF_VOCABULARY - 1},
    {"__class__": type("OtherProcessor", (LogitsProcessor,), {})},
]


def logits_of(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits [NUM_ROWS, vocabulary] with many ties. Some rows are all negative, some are all equal."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-3, 4, (NUM_ROWS, vocabulary), generator=generator) / 4
    logits[::4] -= 5
    logits[1::4] = -0.5
    return logits.to(dtype)


def off_by_one_ulp(logits: torch.Tensor) -> torch.Tensor:
    """Return every logit moved to the next larger number of its dtype."""
    return torch.nextafter(logits, torch.tensor(torch.inf, dtype=logits.dtype))


def lm_head_of(logits: torch.Tensor, num_added: int) -> ParallelLMHead:
    """Return this rank's shard of an lm_head that gives these logits for the rows of an identity matrix."""
    vocabulary = logits.shape[1]
    lm_head = ParallelLMHead(vocabulary, NUM_ROWS, params_dtype=logits.dtype, org_num_embeddings=vocabulary - num_added)
    shard = lm_head.shard_indices
    # A row of padding would win everywhere if it were read.
    weight = torch.full_like(lm_head.weight, 100)
    added = shard.num_org_elements_padded
    weight[: shard.num_org_elements] = logits.T[shard.org_vocab_start_index : shard.org_vocab_end_index]
    weight[added : added + shard.num_added_elements] = logits.T[
        shard.added_vocab_start_index : shard.added_vocab_end_index
    ]
    lm_head.weight.data.copy_(weight)
    return lm_head


def with_some_best(logits: torch.Tensor) -> torch.Tensor:
    """Return logits with SHORTLISTED best tokens in different groups, each far from the next."""
    place = torch.arange(SHORTLISTED)
    # A group has tokens that are a multiple of the number of groups apart.
    apart = logits.shape[1] // SHORTLISTED - 1
    tokens = place * 5 % SHORTLISTED * apart + torch.arange(NUM_ROWS)[:, None] * 3
    return logits.scatter(1, tokens, (30 - 2 * place).to(logits.dtype).expand(NUM_ROWS, -1))


def draft_by_shortlist(logits: torch.Tensor, changed: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Return results of `DraftHead.candidates` before and after the lm_head's weights change, and for chains."""
    lm_head, hidden_states = lm_head_of(logits, 0), hidden_states_of(logits.dtype)
    head = DraftHead(lm_head, get_tp_group(), SHORTLISTED, for_trees=True)
    assert type(head._shortlist) is shortlist.Shortlist
    before = head.candidates(hidden_states, NUM_ROWS)
    lm_head.weight.data.copy_(lm_head_of(changed, 0).weight)
    weight_copy.weights_have_changed()
    weight_copy.refresh()
    after, of_chains = of_trees_and_chains(head, hidden_states)
    assert of_chains[2] is None
    return [tuple(values[:, 0] for values in found) for found in (before, after, (*of_chains[:2], after[2]))]


def greedy_tokens(logits: torch.Tensor, max_rows: int, logit_scale: float | None) -> tuple[torch.Tensor, bool]:
    """Return the target's tokens as a greedy cycle finds them, and whether it leaves out the lm_head."""
    bounded.MAX_ROWS = max_rows
    target = nn.Module()
    target.lm_head, hidden_states = lm_head_of(logits, 0), hidden_states_of(logits.dtype)[1::2]
    target.logits_processor = LogitsProcessor(SimpleNamespace(vocab_size=logits.shape[1]), logit_scale=logit_scale)
    verified = VerifyLogits(target, get_tp_group())
    arguments = (LogitsProcessor._compute_lm_head, target.logits_processor, hidden_states, target.lm_head)
    assert skip_lm_head(*arguments) is not hidden_states
    with verified.for_argmax(True, NUM_ROWS):
        found = skip_lm_head(*arguments)
    assert skip_lm_head(*arguments) is not hidden_states
    assert target.logits_processor.do_tensor_parallel_all_gather == (get_tp_group().world_size > 1)
    if not verified.has_faster_argmax(NUM_ROWS):
        # The cycle asks for all logits.
        return found.argmax(dim=-1), False
    return verified.argmax(found), found is hidden_states


def are_bounded(lm_head: nn.Module, attributes: dict, num_processors: int = 1) -> bool:
    target = nn.Module()
    target.lm_head = lm_head
    for i in range(num_processors):
        processor = LogitsProcessor(SimpleNamespace(vocab_size=OF_VOCABULARY))
        for name, value in attributes.items():
            setattr(processor, name, value)
        setattr(target, f"logits_processor_{i}", processor)
    return VerifyLogits(target, get_tp_group())._head is not None


def which_are_bounded() -> dict:
    """Return of several targets whether their logits are bounded."""
    lm_head = lm_head_of(logits_of(OF_VOCABULARY, torch.bfloat16), 0)
    found = {str(attributes): are_bounded(lm_head, attributes) for attributes in ({}, *OTHER_LOGITS)}
    found["two processors"] = are_bounded(lm_head, {}, num_processors=2)
    found["another module"] = are_bounded(nn.Linear(NUM_ROWS, OF_VOCABULARY), {})
    verify_logits.runs_cycles, original = lambda: False, verify_logits.runs_cycles
    found["only prefills"] = are_bounded(lm_head, {})
    verify_logits.runs_cycles = original
    return found


def of_trees_and_chains(head: DraftHead, hidden_states: torch.Tensor) -> tuple[tuple, tuple]:
    """Return what `DraftHead.candidates` returns for trees, and then for chains alone."""
    of_trees = head.candidates(hidden_states, NUM_ROWS)
    head.draft_chains_only()
    return of_trees, head.candidates(hidden_states, NUM_ROWS)


def hidden_states_of(dtype: torch.dtype) -> torch.Tensor:
    """Return hidden states of two tokens per row. The head must ignore the first token's."""
    rows = torch.stack((torch.full((NUM_ROWS, NUM_ROWS), 7.0), torch.eye(NUM_ROWS)), dim=1)
    return rows.to(dtype).view(2 * NUM_ROWS, NUM_ROWS)


def draft(logits: torch.Tensor, num_added: int) -> tuple[torch.Tensor, ...]:
    """Return the rows' best tokens, and results of `DraftHead.candidates` for drafts that have the rows' logits.

    Those are the candidates, their logits, and the rows' log-sum-exps.
    """
    k = min(CANDIDATES, logits.shape[1])
    lm_head, hidden_states = lm_head_of(logits, num_added), hidden_states_of(logits.dtype)
    head = DraftHead(lm_head, get_tp_group(), k, for_trees=True)
    best = VocabArgmax(lm_head, get_tp_group())(lm_head.quant_method.apply(lm_head, hidden_states[1::2]))
    found, of_chains = of_trees_and_chains(head, hidden_states)
    assert torch.equal(of_chains[0], found[0]) and torch.equal(of_chains[1], found[1]) and of_chains[2] is None
    return best, *(values[:, 0] for values in found)


def serve_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_grad_enabled(False)
    args = ServerArgs(
        model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native", dtype="float32", tp_size=world_size
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{folder}/init",
    )
    initialize_model_parallel(backend="gloo")
    drafts = {}
    for vocabulary, num_added in VOCABULARIES:
        for dtype in DTYPES:
            logits = logits_of(vocabulary, dtype)
            drafts["exact", vocabulary, dtype] = draft(logits, num_added)
            drafts["perturbed", vocabulary, dtype] = draft(off_by_one_ulp(logits) if rank == 1 else logits, num_added)
    logits = logits_of(4096, torch.float32)
    head = DraftHead(lm_head_of(logits, 0), get_tp_group(), CANDIDATES, for_trees=True, multiplier=4.0, softcap=3.0)
    found, of_chains = of_trees_and_chains(head, hidden_states_of(logits.dtype))
    drafts["capped"] = [values[:, 0] for values in (*found, *of_chains[:2])]
    # Pretend that a GPU is present on which the shortlist is faster, and that the vocabularies are large.
    copied.small_m_linear.is_measured, copied._MIN_NUMBERS, shortlist.DEPTH = lambda weight: True, 0, 1
    logits = with_some_best(logits_of(OF_VOCABULARY, torch.bfloat16))
    bounded.DEPTH = 1
    drafts["greedy"] = [greedy_tokens(logits_of(OF_VOCABULARY, torch.bfloat16), *case) for case in GREEDY]
    drafts["bounded"] = which_are_bounded()
    drafts["shortlist"] = draft_by_shortlist(logits, logits.roll(1, dims=0))
    torch.save(drafts, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return every rank's drafts as a function of the number of ranks."""

    @cache
    def run(world_size: int) -> list[dict]:
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        # Forked, so that SGLang is imported once.
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=serve_rank, args=(rank, world_size, str(folder))) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        try:
            assert [process.exitcode for process in processes] == [0] * world_size
        finally:
            for process in processes:
                process.kill()
        return [torch.load(folder / str(rank)) for rank in range(world_size)]

    return run


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [vocabulary for vocabulary, _ in VOCABULARIES])
def test_every_rank_has_the_full_argmax(ranks, world_size, dtype, vocabulary):
    expected = logits_of(vocabulary, dtype).argmax(dim=-1)

    for drafts in ranks(world_size):
        best, *_ = drafts["exact", vocabulary, dtype]
        assert best.tolist() == expected.tolist()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_has_the_greedy_tokens(ranks, world_size):
    """By bounds of the logits where these are products of few rows, else by logits."""
    expected = logits_of(OF_VOCABULARY, torch.bfloat16).argmax(dim=-1).tolist()
    for drafts in ranks(world_size):
        tokens, are_bounded = zip(*drafts["greedy"], strict=True)
        assert [of_case.tolist() for of_case in tokens] == [expected] * len(GREEDY)
        assert are_bounded == (True, False, False)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_only_products_are_bounded(ranks, world_size):
    for drafts in ranks(world_size):
        bounded = [name for name, is_bounded in drafts["bounded"].items() if is_bounded]
        assert bounded == ["{}", "two processors"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_has_the_best_by_shortlist(ranks, world_size):
    """Before and after an update of the weights, and for chains after it."""
    logits = with_some_best(logits_of(OF_VOCABULARY, torch.bfloat16)).float()
    updated = logits.roll(1, dims=0)
    for drafts in ranks(world_size):
        for of_then, (candidates, found, log_sums) in zip((logits, updated, updated), drafts["shortlist"], strict=True):
            values, tokens = (best[:, :SHORTLISTED] for best in of_then.sort(dim=-1, descending=True, stable=True))
            assert torch.equal(candidates, tokens)
            assert torch.equal(found, values)
            torch.testing.assert_close(log_sums, of_then.logsumexp(dim=-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "num_added"), VOCABULARIES)
def test_every_rank_has_the_best_of_the_full_vocabulary(ranks, world_size, dtype, vocabulary, num_added):
    logits = logits_of(vocabulary, dtype).float()
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)

    for drafts in ranks(world_size):
        _, candidates, found, log_sums = drafts["exact", vocabulary, dtype]
        k = candidates.shape[1]
        assert k == min(CANDIDATES, vocabulary)
        assert torch.equal(found, values[:, :k])
        assert torch.equal(logits.gather(1, candidates), found)
        assert all(len(set(row)) == k for row in candidates.tolist())
        if num_added == 0:
            # Otherwise the added tokens of one rank come before the other tokens of the next.
            assert torch.equal(candidates, tokens[:, :k])
        torch.testing.assert_close(log_sums, logits.logsumexp(dim=-1))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_logits_are_multiplied_and_capped(ranks, world_size):
    logits = (logits_of(4096, torch.float32) * 4 / 3).tanh() * 3
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)

    for drafts in ranks(world_size):
        candidates, found, log_sums, of_chains, found_of_chains = drafts["capped"]
        assert torch.equal(candidates, tokens[:, :CANDIDATES]) and torch.equal(of_chains, candidates)
        torch.testing.assert_close(found, values[:, :CANDIDATES])
        torch.testing.assert_close(found_of_chains, found)
        torch.testing.assert_close(log_sums, logits.logsumexp(dim=-1))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_agree_where_one_computes_otherwise(ranks, world_size, dtype):
    """Rank 1's logits are all one ulp larger, which breaks its ties with other ranks. All ranks must still agree."""
    num_changed = [0, 0]
    for vocabulary, _ in VOCABULARIES:
        exact, *_ = (drafts["exact", vocabulary, dtype] for drafts in ranks(world_size))
        first, *others = (drafts["perturbed", vocabulary, dtype] for drafts in ranks(world_size))
        for other in others:
            assert all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True))
        for i in range(2):
            num_changed[i] += int((first[i] != exact[i]).sum())
    assert min(num_changed) > 50, "the perturbation did not matter"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_keys_order_like_logits(dtype):
    finfo = torch.finfo(dtype)
    ascending = [-torch.inf, finfo.min, -1.5, -1.0, -finfo.tiny, 0.0, finfo.tiny, 1.0, 1.0 + finfo.eps, finfo.max]
    logits = torch.tensor([*ascending, torch.inf], dtype=dtype)
    last_token = 2**31 - 1

    keys = pack(logits, torch.zeros(len(logits), dtype=torch.int64), last_token)

    assert (keys.diff() > 0).all()
    assert unpack(keys).tolist() == [last_token] * len(logits)
    # The largest token of a larger logit still beats token 0 of a smaller one.
    assert (keys[1:] > pack(logits[:-1], torch.zeros(len(logits) - 1, dtype=torch.int64), 0)).all()


def test_equal_logits_order_by_descending_token():
    logits, columns = torch.tensor([0.0, -0.0, 0.0, -0.0]), torch.tensor([0, 1, 2, 151935])

    keys = pack(logits, columns, first_token=5)

    assert (keys.diff() < 0).all()
    assert unpack(keys).tolist() == [5, 6, 7, 151940]
