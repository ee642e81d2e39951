"""The recorded drafts of the SmolLM2 pair, with which benchmarks simulate it, commit what the pair commits."""

import pytest
import torch
import torch.nn.functional as F
from bench.pairs import REPO
from safetensors import safe_open
from training.cycles import walk
from training.smollm2.recording import chain_length, chain_walks

from sglang_dflash import ops
from sglang_dflash.engine.simulate import RecordedDrafts
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import DrawParameters, Trees

FILE = REPO / "scripts" / "bench" / "smollm2_drafts.safetensors"
NUM_CANDIDATES = 8
# scripts/results/smollm2-texts_h100_2026-11-25.md, greedy.
CHAIN, TREE_16 = 3.23, 4.17


@pytest.fixture(scope="module")
def records():
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_chains(records):
    tensors, metadata = records
    length = chain_length(chain_walks(tensors))
    assert length == pytest.approx(float(metadata["tokens_per_cycle"]), abs=1e-3) == pytest.approx(CHAIN, rel=0.01)


def test_servers_with_the_vocabulary_of_published_targets_read_them():
    RecordedDrafts(FILE, torch.device("cpu")).check(151936, num_drafts=15, num_candidates=16, has_pairs=False)


def tree_walk(tensors: dict, answer: int, num_nodes: int) -> list[int]:
    """Return the tokens that each cycle commits with trees, as a server grows them."""
    num_tokens, text = int(tensors["num_tokens"][answer]), tensors["answers"][answer].long()
    candidates = tensors["candidates"][answer, :num_tokens, :, :NUM_CANDIDATES].long().contiguous()
    log_probs = tensors["sixteenths"][answer, :num_tokens, :, :NUM_CANDIDATES].float() / -16
    labels = F.pad(text[1:].unfold(0, candidates.shape[1], 1)[:num_tokens], (0, 1), value=-1)
    zeros, own_rows = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    tables = tables_of(text.clamp(min=0).expand(num_tokens, -1), own_rows + 1)
    greedy, log_sums = DrawParameters.greedy(num_tokens, zeros.device), torch.zeros(candidates.shape[:2])
    table = ops.fill_table(candidates, log_probs, log_sums, greedy, zeros, tables, zeros, zeros, own_rows)
    trees = Trees.empty(num_tokens, num_nodes, zeros.device)
    slots = torch.zeros((num_tokens, num_nodes), dtype=torch.int32)
    ops.grow_trees(zeros, candidates, *table, zeros, zeros, own_rows, slots, trees)
    tokens, depths = (rows.view(num_tokens, num_nodes) for rows in (trees.tokens, trees.positions))
    accepted, _ = ops.accept_paths(tokens, trees.parents, labels.gather(1, depths), zeros, labels.shape[1])
    return walk(num_tokens + 1, (accepted.accept_lens - 1).tolist())


def test_trees(records):
    tensors, _ = records
    walks = [tree_walk(tensors, answer, num_nodes=16) for answer in range(len(tensors["num_tokens"]))]
    assert chain_length(walks) == pytest.approx(TREE_16, rel=0.03)
