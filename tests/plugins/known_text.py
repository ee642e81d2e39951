"""Test plugin: for requests whose text is known, drafts are the target's own text with errors.

`support.plugins` installs it. `KNOWN_TEXT` names a JSON file, which may change while the server runs:
    texts: token lists, each of which continues a request's prompt. Drafts of other requests are wrong.
    fault: the step that the server leaves out or does wrong, to show that a test would notice; or null.
    record: folder for the states after every cycle; or null.
Trees have random shapes. `--speculative-adaptive` sees costs for which a draft length of 4 is best, whatever this
machine is doing.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from support.random_trees import ancestors_of, paths_to_nodes

VOCAB_SIZE = 1024


class KnownText:
    """Tokens to draft at every position of every request, in rows like those of `req_to_token`."""

    def __init__(self, path: Path) -> None:
        self._path, self._time = path, None
        self.texts: list[list[int]] = []
        self.fault: str | None = None
        self.record: Path | None = None
        self.table: torch.Tensor | None = None
        # Records the states of a cycle once they have advanced, to lengths, [bs].
        self.after_commit: Callable[[torch.Tensor], None] | None = None
        # Slots of recurrent states, while the pool does not say them.
        self.slots: torch.Tensor | None = None

    def read(self) -> None:
        time = self._path.stat().st_mtime_ns
        if time != self._time:
            content = json.loads(self._path.read_text())
            self._time, self.texts, self.fault = time, content["texts"], content["fault"]
            self.record = content["record"] and Path(content["record"])

    def begin(self, req) -> None:
        """Set the tokens of a request that is about to be prefilled."""
        prompt = list(req.origin_input_ids)
        text = next((text for text in self.texts if text[: len(prompt)] == prompt), [])
        row = self.table[req.kv.req_pool_idx]
        row.fill_(-1)
        row[: len(text)] = torch.tensor(text, dtype=torch.int64, device=row.device)[: len(row)]

    def write(self, rows: torch.Tensor, batch) -> None:
        """Replace all but the first token of each row: rows [bs, W] int64."""
        if rows.shape[1] == 1:
            return
        positions = batch.positions.view_as(rows).clamp(max=self.table.shape[1] - 1)
        known = self.table[batch.req_pool_indices[:, None], positions]
        columns = torch.arange(rows.shape[1], device=rows.device)
        # In turn, a block has one wrong draft, no wrong draft, and only wrong drafts. The wrong one is at every
        # position.
        kind, place = batch.seq_lens % 3, 1 + batch.seq_lens // 3 % (rows.shape[1] - 1)
        wrong = (known < 0) | ((kind == 0)[:, None] & (columns == place[:, None])) | (kind == 2)[:, None]
        drafts = torch.where(wrong, (known + 1) % VOCAB_SIZE, known)
        rows[:, 1:] = drafts[:, 1:]

    def plant(self, trees, batch, block) -> None:
        """Other trees in place of those that were grown: of random shapes, with the known text on one path.

        Requests that have a chain in their tree keep it.
        """
        bs, num_nodes = trees.parents.shape
        width = len(block.input_ids) // bs
        if num_nodes == 1:
            return
        tokens, positions = (rows.view(bs, -1) for rows in (trees.tokens, trees.positions))
        before = trees.positions.clone()
        for i, seq_len in enumerate(batch.seq_lens.tolist()):
            choose = random.Random(seq_len)
            known = self.table[batch.req_pool_indices[i], seq_len : seq_len + width].tolist()
            known += [-1] * (width - len(known))
            if block.is_chain[i]:
                path, parents = list(range(width)), trees.parents[i].tolist()
            else:
                # Of three paths one is wrong in every place; all lengths and all places occur.
                length = min(1 + seq_len // 3 % width, num_nodes)
                path = [0, *sorted(choose.sample(range(1, num_nodes), length - 1))]
                parents = dict(zip(path[1:], path))
                depths = [0]
                for node in range(1, num_nodes):
                    shallow = [other for other in range(node) if depths[other] < width - 1]
                    parents.setdefault(node, choose.choice(shallow))
                    depths.append(depths[parents[node]] + 1)
                parents = [-1, *(parents[node] for node in range(1, num_nodes))]
            trees.parents[i] = torch.tensor(parents)
            trees.ancestors[i] = ancestors_of(trees.parents[i : i + 1])[0]
            to_nodes = paths_to_nodes(trees.parents[i])
            wrong_place = {0: 1 + seq_len // 9 % (width - 1), 1: width, 2: 0}[seq_len % 3]
            for node in range(1, num_nodes):
                if parents[node] < 0:
                    continue
                depth = len(to_nodes[node]) - 1
                is_right = node in path and known[depth] >= 0 and wrong_place not in (0, depth)
                # No two nodes of the same parent have the same token.
                tokens[i, node] = known[depth] if is_right else (known[depth] + 1 + node) % VOCAB_SIZE
                positions[i, node] = seq_len + depth
        if batch.mrope_positions is not None:
            batch.mrope_positions += trees.positions - before

    def save(self, states, slots: torch.Tensor, reqs: list, lens: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """Save the states of a batch after a cycle. `lens`: tokens of each request."""
        content = {
            "prompts": [len(req.origin_input_ids) for req in reqs],
            "lens": lens.tolist(),
            "accept_lens": accept_lens.tolist(),
            "conv": states.conv[:, slots.long()].cpu(),
            "temporal": states.temporal[:, slots.long()].cpu(),
        }
        torch.save(content, self.record / f"{len(list(self.record.iterdir()))}.pt")


def register() -> None:
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from sglang_dflash.engine.adaptive.cost import MeasuredCost
    from sglang_dflash.engine.verification import ChainVerification, TreeVerification
    from sglang_dflash.engine.worker import DFlashWorker
    from sglang_dflash.recurrent.state import PendingCommit, RecurrentState
    from sglang_dflash.verify.sampler import FallbackSampler

    known = KnownText(Path(os.environ["KNOWN_TEXT"]))
    alloc_memory_pool, prefill, draft = DFlashWorker.alloc_memory_pool, DFlashWorker._prefill, ChainVerification.draft
    add_cost, resolve, run = MeasuredCost._add, FallbackSampler.resolve, PendingCommit.run
    commit, step = RecurrentState.commit_to, DFlashWorker.forward_batch_generation
    draft_trees = TreeVerification.draft

    def allocate(worker, *args, **kwargs):
        alloc_memory_pool(worker, *args, **kwargs)
        known.table = torch.full_like(worker.req_to_token_pool.req_to_token, -1, dtype=torch.int64)

    def begin(worker, batch, on_publish):
        fault = known.fault
        known.read()
        if known.fault not in (None, fault):
            # States that an earlier test has left in a slot could be right by chance.
            states = worker.req_to_token_pool.mamba_pool.mamba_cache
            states.temporal.zero_()
            states.conv[0].zero_()
        for req in batch.reqs:
            known.begin(req)
        return prefill(worker, batch, on_publish)

    def overwrite(verification, head, hidden_states, batch, block):
        known.read()
        drafts = draft(verification, head, hidden_states, batch, block)
        known.write(drafts.block_tokens, batch)
        return drafts

    def overwrite_trees(verification, head, hidden_states, batch, block):
        known.read()
        drafts = draft_trees(verification, head, hidden_states, batch, block)
        known.plant(drafts.trees, batch, block)
        return drafts

    def run_and_record(pending):
        run(pending)
        if known.after_commit is not None:
            known.after_commit(pending.seq_lens + pending.accept_lens)
            known.after_commit = None

    def commit_or_not(states, slots, rows, seq_lens, accept_lens, paths, is_due=None):
        if known.fault == "paths":
            paths = torch.arange(paths.shape[1], device=paths.device).expand_as(paths)
        if known.fault == "track":
            slots = replace(slots, kept=None)
        if known.fault != "commit":
            commit(states, slots, rows, seq_lens, accept_lens, paths, is_due)

    def resolve_late(sampler, batch, fallback, *args):
        # Once a graph has been replayed, the scheduler may give the requests' rows to others.
        pool = batch.req_to_token_pool
        if fallback and isinstance(pool, HybridReqToTokenPool):
            known.slots = pool.req_index_to_mamba_index_mapping.clone()
            pool.req_index_to_mamba_index_mapping.zero_()
        return resolve(sampler, batch, fallback, *args)

    def add_known_cost(cost, bs, length, seconds):
        add_cost(cost, bs, length, bs * (1 + length / 16 if length <= 4 else length))

    def recorded(worker, batch, *args, **kwargs):
        is_decode = batch.forward_mode.is_decode()
        result = step(worker, batch, *args, **kwargs)
        if known.slots is not None:
            worker.req_to_token_pool.req_index_to_mamba_index_mapping.copy_(known.slots)
            known.slots = None
        if is_decode and known.record is not None:
            slots = worker.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)
            states, reqs, accept_lens = worker._pools.states._states, list(batch.reqs), result.accept_lens

            def record(lens: torch.Tensor) -> None:
                known.save(states, slots, reqs, lens, accept_lens)

            if PendingCommit.of(result) is None:
                record(result.new_seq_lens)
            else:
                known.after_commit = record
        return result

    DFlashWorker.alloc_memory_pool, DFlashWorker._prefill, ChainVerification.draft = allocate, begin, overwrite
    DFlashWorker.forward_batch_generation = recorded
    MeasuredCost._add, TreeVerification.draft = add_known_cost, overwrite_trees
    RecurrentState.commit_to, PendingCommit.run = commit_or_not, run_and_record
    FallbackSampler.resolve = resolve_late
