"""Drafter stage: block drafting, learned from the frozen target's features and its own answers."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor

from training import processes
from training.blocks import (
    accept_lengths,
    after_anchors,
    autocast,
    block_loss,
    draft_blocks,
    follow_chains,
    initialize,
    random_anchors,
    row_weights,
    run_blocks,
)
from training.files import save_checkpoint
from training.loop import step_generator, train
from training.smollm2.block_attention import block_mask
from training.smollm2.head_loss import head_loss
from training.smollm2.llama import Llama
from training.smollm2.selector import EmbeddingSelector, selector_loss
from training.smollm2.settings import DRAFTER_STAGE, POOL_STAGE, Settings

# The step number that draws the anchors of the evaluation.
VALIDATION_STEP = 999_999
# Prefix of the tensors that training has in another form.
SELECTOR = "candidate_selector."


@dataclass
class Batch:
    """Rows of `conversations.run`.

    Attributes:
        tokens, best: [bs, T] int64.
        is_answer: [bs, T] bool.
        temperatures: [bs] of the answers.
    """

    tokens: Tensor
    best: Tensor
    is_answer: Tensor
    temperatures: Tensor

    def joined(self, num_rows: int) -> "Batch":
        """Return the same tokens as fewer and longer rows, with conversations one after another."""
        flat = (values.view(num_rows, -1) for values in (self.tokens, self.best, self.is_answer))
        return Batch(*flat, self.temperatures.view(num_rows, -1))


class Conversations:
    """Rows of this process, and a pool of their features that serves many batches.

    The target's forward takes as long as the drafter's training on its features. So it runs once for `pool_rows` rows,
    from which the batches of some hundred steps are drawn. After some pools all rows have been used.
    """

    def __init__(self, llama: Llama, settings: Settings):
        generated = torch.load(settings.work / f"generated_{processes.rank()}.pt", weights_only=True)
        self.rows = Batch(**{name: tensor.to(settings.device) for name, tensor in generated.items()})
        self.num_train = num_train_rows(len(self.rows.tokens), settings)
        self.llama, self.settings = llama, settings
        self.layer_ids = settings.drafter_config["dflash_config"]["target_layer_ids"]
        # Some features are a hundred times as large as others. The optimizer's steps are equally long in all weights,
        # so it gets normalised features. The saved weights read the features unscaled.
        first = self.take(torch.arange(settings.drafter_batch, device=settings.device))
        self.feature_scale = feature_sizes(llama.features(first.tokens, self.layer_ids))
        # The pool: indices of rows, and the result of `read` for them, which the next pool overwrites.
        self.pool_number, self.pool = None, None
        read = self.read(first)
        shape = (min(settings.pool_rows, self.num_train), *read.shape[1:])
        self.pool_read = torch.empty(shape, dtype=read.dtype, device=settings.device)

    def take(self, indices: Tensor) -> Batch:
        """Return rows by their indices."""
        rows = self.rows
        return Batch(
            rows.tokens[indices].long(), rows.best[indices].long(), rows.is_answer[indices], rows.temperatures[indices]
        )

    def held_out(self) -> Tensor:
        """Return the indices of the rows that are held out for evaluation."""
        numbers = torch.arange(self.num_train, len(self.rows.tokens), device=self.settings.device)
        return numbers[: self.settings.validation_rows]

    def features(self, batch: Batch) -> Tensor:
        """Return features [bs, T, F], normalised, in the target's dtype."""
        return self.read(batch)[..., : len(self.feature_scale)]

    def read(self, batch: Batch) -> Tensor:
        """Return features and the input of the target's lm_head: [bs, T, F + H]."""
        num_features = len(self.feature_scale)
        states = self.llama.features(batch.tokens, [*self.layer_ids, self.llama.num_layers - 1])
        states[..., :num_features] /= self.feature_scale
        states[..., num_features:] = self.llama.normed(states[..., num_features:])
        return states

    def draw(self, step: int, generator: torch.Generator) -> tuple[Batch, Tensor, Tensor]:
        """Return a step's batch, its features, and the input of the target's lm_head, [bs, T, H]."""
        settings, device = self.settings, self.settings.device
        if step % settings.long_every == settings.long_every - 1:
            shape = (settings.long_batch * settings.long_parts,)
            indices = torch.randint(self.num_train, shape, generator=generator, device=device)
            batch = self.take(indices).joined(settings.long_batch)
            return batch, *self.read(batch).tensor_split([len(self.feature_scale)], dim=-1)
        self._fill_pool(step * settings.drafter_batch // (settings.pool_rows * settings.pool_uses))
        places = torch.randint(len(self.pool), (settings.drafter_batch,), generator=generator, device=device)
        read = self.pool_read[places].tensor_split([len(self.feature_scale)], dim=-1)
        return self.take(self.pool[places]), *read

    def _fill_pool(self, number: int) -> None:
        if number == self.pool_number:
            return
        generator = step_generator(self.settings.seed, POOL_STAGE, number, self.settings.device)
        order = torch.randperm(self.num_train, generator=generator, device=self.settings.device)
        self.pool, self.pool_number = order[: len(self.pool_read)], number
        for i in range(0, len(self.pool), self.settings.drafter_batch):
            part = slice(i, i + self.settings.drafter_batch)
            self.pool_read[part] = self.read(self.take(self.pool[part]))


def run(settings: Settings) -> None:
    """Train the drafter and write it to `out/drafter`."""
    train_drafter("drafter", settings.drafter_config, settings.init, settings.drafter_dir, settings)


def train_drafter(name: str, config: dict, init: Path | None, folder: Path, settings: Settings) -> None:
    """Train a drafter in float32 with bf16 autocast and write it, rounded to bf16.

    Args:
        name: of the training, for its files in `work`.
        config: content of the drafter's `config.json`.
        init: the drafter to continue from; None: one with random weights.
        folder: where the drafter is written.
        settings: of the run.
    """
    torch.manual_seed(settings.seed)
    llama = Llama(settings.target_dir, settings.device)
    conversations = Conversations(llama, settings)
    drafter = new_drafter(config, init, llama.embedding, conversations.feature_scale, settings)
    loss = StepLoss(drafter, conversations, settings)
    # Compilation takes as long as a thousand steps, and is no part of the training's time.
    for step in {0, settings.long_every - 1}:
        loss.at(step).backward()
    drafter.zero_grad()

    def evaluate() -> dict[str, float]:
        return measure_held_out(drafter, conversations, settings)

    def save() -> None:
        weights = {key: tensor for key, tensor in drafter.state_dict().items() if not key.startswith(SELECTOR)}
        weights["fc.weight"] = weights["fc.weight"] / conversations.feature_scale
        if drafter.candidate_selector is not None:
            weights |= {SELECTOR + key: tensor for key, tensor in drafter.candidate_selector.checkpoint().items()}
        save_checkpoint(folder, config, weights)

    train(name, drafter, loss.at, evaluate, save, settings.drafter, settings.work)


class StepLoss:
    """The loss of a training's steps."""

    def __init__(self, drafter: ReferenceDrafter, conversations: Conversations, settings: Settings):
        self.drafter, self.conversations, self.settings = drafter, conversations, settings
        self.head = conversations.llama.embedding
        is_compiled = settings.device == "cuda"
        self.draft = torch.compile(run_blocks, dynamic=False, fullgraph=True) if is_compiled else run_blocks

    def at(self, step: int) -> Tensor:
        """Return the loss of a step's batch, which depends only on the step and the process."""
        settings, block_size = self.settings, self.drafter.config.block_size
        generator = step_generator(settings.seed, DRAFTER_STAGE, step, settings.device)
        batch, features, target_hidden = self.conversations.draw(step, generator)
        is_long = batch.tokens.shape[1] > settings.length
        count = settings.long_anchors if is_long else settings.anchors
        anchors = random_anchors(batch.is_answer, count, block_size, generator).sort(dim=1).values
        sizes = random_sizes(anchors, block_size, settings.cut_share, generator)
        mask = block_mask(anchors, sizes, batch.tokens.shape[1], block_size)
        hidden = self.draft(self.drafter, self.head, features, batch.tokens, anchors, mask)
        is_in_block = torch.arange(1, block_size, device=sizes.device) < sizes[..., None]
        return self._of_blocks(hidden, batch, target_hidden, anchors, is_in_block)

    def _of_blocks(
        self, hidden: Tensor, batch: Batch, target_hidden: Tensor, anchors: Tensor, is_in_block: Tensor
    ) -> Tensor:
        """Return the loss of drafts [bs, A, W - 1, H].

        Drafts that do not count are left out, and the drafts of least weight beyond the share of the lm_head. Pairs
        count in whole answers: second choices of the text are what trees ask about.
        """
        settings, block_size, pairs = self.settings, self.drafter.config.block_size, self.drafter.candidate_selector
        labels, counts = greedy_labels(batch, anchors, block_size)
        by_row = row_weights(block_size, settings.loss_gamma, counts.device)
        weights = (counts * is_in_block * by_row).flatten()
        pair_weights = torch.zeros_like(weights)
        if pairs is not None:
            is_answer = after_anchors(batch.is_answer, anchors, block_size).cumprod(-1)
            pair_weights = (is_answer * is_in_block * by_row).flatten()
        chosen = (weights + pair_weights).topk(int(settings.head_share * len(weights)), sorted=False).indices
        weights, pair_weights = (
            values[chosen] / values[chosen].sum().clamp(min=1) for values in (weights, pair_weights)
        )
        hidden = hidden.flatten(0, 2).index_select(0, chosen)
        target_hidden = before_labels(target_hidden, anchors, block_size).index_select(0, chosen)
        labels, head, share = labels.flatten()[chosen], self.head, settings.soft_share
        num_candidates = 0 if pairs is None else pairs.num_candidates
        loss, candidates = head_loss(hidden, target_hidden, head, labels, weights, share, num_candidates)
        if pairs is None:
            return loss
        before = tokens_before(batch.tokens, anchors, block_size).flatten()[chosen]
        with autocast(hidden.device):
            return loss + selector_loss(
                pairs, hidden, target_hidden, head, candidates, before, labels, pair_weights, share
            )


def measure_held_out(drafter: ReferenceDrafter, conversations: Conversations, settings: Settings) -> dict[str, float]:
    """Return the loss and the acceptance lengths on held-out conversations, over all processes."""
    llama, block_size = conversations.llama, drafter.config.block_size
    generator = step_generator(settings.seed, DRAFTER_STAGE, VALIDATION_STEP, settings.device)
    sums = torch.zeros(2, device=settings.device)
    by_temperature = torch.zeros(len(settings.answer_temperatures), 2, device=settings.device)
    for indices in conversations.held_out().split(settings.drafter_batch):
        batch = conversations.take(indices)
        anchors = random_anchors(batch.is_answer, settings.anchors, block_size, generator)
        hidden = draft_blocks(drafter, llama.embedding, conversations.features(batch), batch.tokens, anchors)
        with autocast(hidden.device):
            logits = F.linear(hidden, llama.embedding)
            drafts = follow_chains(drafter, hidden, logits, batch.tokens.gather(1, anchors))
        labels = after_anchors(batch.tokens, anchors, block_size)
        # The tokens after an answer are not the target's.
        counts = after_anchors(batch.is_answer, anchors, block_size).cumprod(-1).bool()
        sums += torch.stack([block_loss(logits, labels, counts, settings.loss_gamma), sums.new_ones(())])
        lengths = accept_lengths(drafts, labels, counts).float().mean(-1)
        for i, (temperature, _) in enumerate(settings.answer_temperatures):
            chosen = lengths[batch.temperatures == temperature]
            by_temperature[i] += torch.stack([chosen.sum(), chosen.new_tensor(len(chosen))])
    sums, by_temperature = processes.average(sums), processes.average(by_temperature)
    total = by_temperature.sum(0)
    metrics = {"loss": float(sums[0] / sums[1]), "accept_length": float(total[0] / total[1])}
    for (temperature, _), (length, number) in zip(settings.answer_temperatures, by_temperature, strict=True):
        metrics[f"accept_length_t{temperature:g}"] = float(length / number.clamp(min=1e-9))
    return metrics


def greedy_labels(batch: Batch, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the labels of drafts: the target's argmax, as long as the text follows it.

    A draft is accepted only if all drafts before it are, and those equal the argmax. So after a token that differs from
    the argmax no label counts. At that token itself the argmax is the label, which the text does not show.

    Returns:
        labels: [bs, A, W - 1] int64.
        counts: [bs, A, W - 1] bool. Which labels count.
    """
    is_answer = after_anchors(batch.is_answer, anchors, block_size)
    follows = after_anchors(batch.is_answer & (batch.tokens == batch.best), anchors, block_size).cumprod(-1)
    counts = is_answer & F.pad(follows[..., :-1], (1, 0), value=1).bool()
    return after_anchors(batch.best, anchors, block_size), counts


def before_labels(target_hidden: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Return the inputs of the target's lm_head for the labels: [bs, T, H] -> [bs * A * (W - 1), H]."""
    positions = (anchors[..., None] + torch.arange(block_size - 1, device=anchors.device)).flatten(1)
    starts = torch.arange(len(anchors), device=anchors.device)[:, None] * target_hidden.shape[1]
    return target_hidden.flatten(0, 1)[(starts + positions).flatten()]


def tokens_before(tokens: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Return the text's token before each label: [bs, T] -> [bs, A, W - 1]."""
    return after_anchors(tokens, anchors - 1, block_size)


def random_sizes(anchors: Tensor, block_size: int, cut_share: float, generator: torch.Generator) -> Tensor:
    """Return sizes of blocks [bs, A]: W, or for a share of them a random size of at least 2."""
    draws = torch.rand(2, *anchors.shape, generator=generator, device=anchors.device)
    cut = 2 + (draws[0] * (block_size - 2)).long()
    return torch.where(draws[1] < cut_share, cut, block_size)


def feature_sizes(features: Tensor) -> Tensor:
    """Return the root mean square of each feature over all processes: [bs, T, F] -> [F], in their dtype."""
    # The features of the first token have another order of magnitude.
    squares = processes.average(features[:, 1:].float().square().mean((0, 1)))
    return squares.sqrt().to(features.dtype)


def new_drafter(
    config: dict, init: Path | None, embedding: Tensor, feature_scale: Tensor, settings: Settings
) -> ReferenceDrafter:
    """Return a drafter with random weights, or with those of another, in float32.

    Convolutions and scores of pairs that the other drafter does not have begin as the identity and as zero.

    Args:
        config: of the drafter.
        init: folder of the other drafter.
        embedding: [V, H]. The target's.
        feature_scale: [F]. Features are divided by it before `fc` reads them.
        settings: of the run.

    Raises:
        ValueError: the other drafter lacks more.
    """
    drafter = ReferenceDrafter(config)
    initialize(drafter, config["initializer_range"])
    drafter.to(settings.device)
    selector = None
    if drafter.candidate_selector is not None:
        selector = EmbeddingSelector(embedding, *drafter.config.selector).to(settings.device)
        drafter.candidate_selector = selector
    if init is None:
        return drafter
    tensors = load_file(init / "model.safetensors", device=settings.device)
    of_pairs = {key.removeprefix(SELECTOR): tensors.pop(key) for key in list(tensors) if key.startswith(SELECTOR)}
    if of_pairs and selector is not None:
        selector.read_checkpoint(of_pairs)
    missing, unexpected = drafter.load_state_dict(tensors, strict=False)
    wrong = [key for key in missing if "_conv." not in key and not key.startswith(SELECTOR)] + unexpected
    if wrong or (of_pairs and selector is None):
        raise ValueError(f"{init}: is no beginning of this drafter: {wrong or list(of_pairs)}")
    drafter.fc.weight.data *= feature_scale
    return drafter


def num_train_rows(num_rows: int, settings: Settings) -> int:
    """Return the number of rows of one process to train on, from the first."""
    return num_rows - max(1, round(settings.held_out_share * num_rows))
