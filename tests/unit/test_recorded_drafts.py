"""The recorded drafts of the SmolLM2 pair, with which benchmarks simulate it, commit what the pair commits."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bench.pairs import REPO
from safetensors import safe_open
from training.cycles import walk
from training.smollm2.recording import chain_length, chain_walks

from sglang_dflash import ops
from sglang_dflash.checkpoint.config import DEFAULT_CANDIDATES
from sglang_dflash.engine.simulate import RecordedDrafts
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import DrawParameters, Trees

FILE = REPO / "scripts" / "bench" / "smollm2_drafts.safetensors"
# scripts/results/smollm2-texts_h100_2026-11-25.md, greedy, 8 candidates: chains of the best tokens, and trees.
CHAIN, TREE_16 = 3.23, 4.17
# docs/development.md.
FOLLOWING = 3.30


@pytest.fixture(scope="module")
def records():
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_chains_of_the_best_tokens(records):
    """They are what the in-tree worker drafts."""
    tensors, metadata = records
    length = chain_length(chain_walks(tensors))
    assert length == pytest.approx(float(metadata["tokens_per_cycle"]), abs=1e-3) == pytest.approx(CHAIN, rel=0.01)


def test_servers_with_the_vocabulary_of_published_targets_read_them():
    RecordedDrafts(FILE, 1, torch.device("cpu")).check(151936, num_drafts=15, num_candidates=16, has_pairs=False)


def served_walk(tensors: dict, answer: int, num_candidates: int, num_nodes: int | None) -> list[int]:
    """Return the tokens that each cycle commits with chains (`num_nodes` None) or trees, as a server drafts them."""
    num_tokens, text = int(tensors["num_tokens"][answer]), tensors["answers"][answer].long()
    candidates = tensors["candidates"][answer, :num_tokens, :, :num_candidates].long().contiguous()
    log_probs = tensors["sixteenths"][answer, :num_tokens, :, :num_candidates].float() / -16
    labels = F.pad(text[1:].unfold(0, candidates.shape[1], 1)[:num_tokens], (0, 1), value=-1)
    zeros, own_rows = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    tables = tables_of(text.clamp(min=0).expand(num_tokens, -1), own_rows + 1)
    greedy, log_sums = DrawParameters.greedy(num_tokens, zeros.device), torch.zeros(candidates.shape[:2])
    table = ops.fill_table(candidates, log_probs, log_sums, greedy, zeros, tables, zeros, zeros, own_rows)
    if num_nodes is None:
        chains = zeros[:, None].repeat(1, labels.shape[1])
        ops.follow_table(candidates, table[1], chains)
        accepted = ops.accept_prefix(chains, labels, zeros)
    else:
        trees = Trees.empty(num_tokens, num_nodes, zeros.device)
        slots = torch.zeros((num_tokens, num_nodes), dtype=torch.int32)
        ops.grow_trees(zeros, candidates, *table, zeros, zeros, own_rows, slots, trees)
        tokens, depths = (rows.view(num_tokens, num_nodes) for rows in (trees.tokens, trees.positions))
        accepted, _ = ops.accept_paths(tokens, trees.parents, labels.gather(1, depths), zeros, labels.shape[1])
    return walk(num_tokens + 1, (accepted.accept_lens - 1).tolist())


def served_length(tensors: dict, num_candidates: int, num_nodes: int | None) -> float:
    answers = range(len(tensors["num_tokens"]))
    return chain_length([served_walk(tensors, answer, num_candidates, num_nodes) for answer in answers])


def test_chains(records):
    """Chains follow the table."""
    tensors, _ = records
    assert served_length(tensors, 1, None) == pytest.approx(chain_length(chain_walks(tensors)))
    assert served_length(tensors, DEFAULT_CANDIDATES, None) == pytest.approx(FOLLOWING, abs=0.005)


def test_trees(records):
    tensors, _ = records
    assert served_length(tensors, 8, 16) == pytest.approx(TREE_16, rel=0.03)


def write(drafts: RecordedDrafts, slot: int, prompt: list[int], length: int) -> tuple[int, ...]:
    """Return the answer of a request whose text has `length` tokens when its first cycle begins."""
    slots, reqs = torch.tensor([slot]), [SimpleNamespace(origin_input_ids=prompt)]
    drafts.begin_requests(SimpleNamespace(reqs=reqs, req_pool_indices=slots))
    return tuple(int(drafts.choose(slots, at, at, slots)) for at in torch.arange(length, length + 320).split(1))


def test_text_follows_from_prompt_and_length():
    """Engines that took different numbers of cycles write the same text, so that they are compared on it."""
    drafts = RecordedDrafts(FILE, 8, torch.device("cpu"))
    first = write(drafts, 3, [5, 6, 7], 256)
    assert write(drafts, 4, [5, 6, 7], 256) == first
    assert write(drafts, 3, [5, 6, 8], 256) != first


def test_one_client_gets_all_answers(records):
    """Its requests have the same slot."""
    num_answers = len(records[0]["num_tokens"])
    drafts = RecordedDrafts(FILE, 8, torch.device("cpu"))
    assert len({write(drafts, 1, [i, i + 1], 0) for i in range(8 * num_answers)}) == num_answers
