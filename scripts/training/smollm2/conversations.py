"""Generate stage: the target writes both sides of conversations, after its chat template and a user's first words."""

import random
import time

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training import processes
from training.loop import step_generator
from training.smollm2.decoder import Rows, run_steps, sample
from training.smollm2.llama import Llama
from training.smollm2.openings import draw_opening
from training.smollm2.settings import GENERATE_STAGE, TURN_END_ID, Settings

USER, ANSWER = 0, 1
NOT_GIVEN = -1


def make(settings: Settings) -> None:
    """Write the target to `work/target`."""
    # No other stage needs the package that reads GGUF files.
    from models.smollm2.make_target import make_target

    if processes.rank() == 0:
        make_target(settings.source, settings.target_dir)


def run(settings: Settings) -> None:
    """Write the conversations of every process to `work/generated_<rank>.pt`.

    The last `held_out_share` of the rows is not trained on. The file has:
        tokens: [rows, length] int32.
        is_answer: [rows, length] bool. Tokens that the target wrote as the assistant, with the ends of turns.
        best: [rows, length] int32. The target's argmax at those tokens.
        temperatures: [rows] of the answers.
    """
    llama = Llama(settings.target_dir, settings.device)
    conversations = Conversations(llama, load_tokenizer(settings), settings)
    torch.manual_seed(settings.seed * 64 + processes.rank())
    step = conversations.rows.record(conversations.choose)

    batches, started = [], time.monotonic()
    while True:
        batch_started = time.monotonic()
        generator = step_generator(settings.seed, GENERATE_STAGE, len(batches), settings.device)
        conversations.begin(generator, random.Random(f"{settings.seed} {processes.rank()} {len(batches)}"))
        run_steps(step, settings.length - conversations.num_opening, f"conversations {len(batches)}")
        batches.append(conversations.result())
        # Another batch like the last one must fit. All processes make the same number.
        now = time.monotonic()
        if processes.first_says(now - started + (now - batch_started) > settings.generation_seconds):
            break
    generated = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    torch.save(generated, settings.work / f"generated_{processes.rank()}.pt")
    if processes.rank() == 0:
        num_tokens = generated["tokens"].numel() * processes.count()
        share = float(generated["is_answer"].float().mean())
        seconds = time.monotonic() - started
        print(f"generated: {num_tokens:,} tokens in {seconds:.0f} s, {share:.2f} of them answers", flush=True)
        for row in generated["tokens"][:3].tolist():
            print("----", conversations.tokenizer.decode(row), flush=True)


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer."""
    return AutoTokenizer.from_pretrained(settings.target_dir)


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that the chat template adds.

    Returns:
        opening: tokens before the first user's words.
        between: tokens after the end of a user's turn, and after the end of an answer.
    """
    messages = [
        {"role": "user", "content": "X"},
        {"role": "assistant", "content": "Y"},
        {"role": "user", "content": "Z"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    opening, rest = text.split("X<|im_end|>")
    to_answer, rest = rest.split("Y<|im_end|>")
    to_user = rest.split("Z<|im_end|>")[0]
    return tokenizer.encode(opening), [tokenizer.encode(to_answer), tokenizer.encode(to_user)]


class Conversations:
    """Rows in which the target speaks in turns. The end of a turn is followed by the template's start of the next.

    Attributes:
        is_answer, best: [rows, length] bool and int64, see :func:`run`.
    """

    def __init__(self, llama: Llama, tokenizer: PreTrainedTokenizerBase, settings: Settings):
        self.settings = settings
        self.tokenizer = tokenizer
        opening, between = template_tokens(tokenizer)
        self.opening, self.num_opening = torch.tensor(opening, device=llama.device), len(opening)
        # [2, tokens], padded with NOT_GIVEN.
        between = [torch.tensor(tokens, device=llama.device) for tokens in between]
        self.between = pad_sequence(between, batch_first=True, padding_value=NOT_GIVEN)
        self.num_rows = settings.generation_batch
        # A turn that ends late writes its template past the tokens that are kept.
        spare = self.between.shape[1] + 1
        self.rows = Rows(llama, self.num_rows, settings.length + spare)
        self.is_answer = torch.zeros_like(self.rows.given)
        self.best = torch.zeros_like(self.rows.tokens)
        self.role = torch.zeros(self.num_rows, dtype=torch.long, device=llama.device)
        self.turn_tokens = torch.zeros_like(self.role)
        self.template_columns = torch.arange(1, spare, device=llama.device)
        # [2, rows], by role.
        self.temperatures = torch.zeros(2, self.num_rows, device=llama.device)
        self.max_turn_tokens = torch.tensor([settings.max_user_tokens, settings.max_answer_tokens], device=llama.device)

    def begin(self, generator: torch.Generator, rng: random.Random) -> None:
        """Start new conversations with random temperatures and first words."""
        low, high = self.settings.user_temperatures
        draws = torch.rand(2, self.num_rows, generator=generator, device=self.role.device)
        self.temperatures[USER] = low + (high - low) * draws[USER]
        temperatures, shares = torch.tensor(self.settings.answer_temperatures, device=self.role.device).unbind(1)
        kinds = torch.searchsorted(shares.cumsum(0), draws[ANSWER]).clamp(max=len(shares) - 1)
        self.temperatures[ANSWER] = temperatures[kinds]
        self.rows.tokens[:, : self.num_opening] = self.opening
        self.rows.given.zero_()
        words = [self.tokenizer.encode(draw_opening(rng))[: self.settings.max_opening_tokens] for _ in self.role]
        end = self.num_opening + self.settings.max_opening_tokens
        padded = torch.tensor([row + [NOT_GIVEN] * (end - self.num_opening - len(row)) for row in words])
        self.rows.tokens[:, self.num_opening : end] = padded.clamp(min=0).to(self.role.device)
        self.rows.given[:, self.num_opening : end] = padded.to(self.role.device) != NOT_GIVEN
        self.is_answer.zero_()
        self.role.zero_()
        self.turn_tokens.zero_()
        self.rows.start(self.num_opening)

    def choose(self, logits: Tensor) -> Tensor:
        """Choose the next token of every row (see `decoder.Choose`), and count turns."""
        rows, position = self.rows, self.rows.position
        is_given = rows.given.index_select(1, position)[:, 0]
        temperatures = self.temperatures.gather(0, self.role[None])[0]
        self.best.index_copy_(1, position, logits.argmax(-1)[:, None])
        sampled = sample(logits, temperatures)
        self.turn_tokens += 1
        is_cut = self.turn_tokens >= self.max_turn_tokens[self.role]
        is_answer = ~is_given & ~is_cut & (self.role == ANSWER)
        self.is_answer.index_copy_(1, position, is_answer[:, None])
        chosen = sampled.masked_fill(is_cut, TURN_END_ID)
        ends = ~is_given & (chosen == TURN_END_ID)

        columns = position + self.template_columns
        template = self.between[self.role]
        is_template = ends[:, None] & (template != NOT_GIVEN)
        rows.tokens.index_copy_(1, columns, torch.where(is_template, template, rows.tokens.index_select(1, columns)))
        rows.given.index_copy_(1, columns, is_template | rows.given.index_select(1, columns))
        # Tokens of the template do not count: the count starts below zero.
        self.turn_tokens.copy_(torch.where(ends, -is_template.sum(1), self.turn_tokens))
        self.role.copy_(torch.where(ends, 1 - self.role, self.role))
        return chosen

    def result(self) -> dict[str, Tensor]:
        """Return the entries of :func:`run` for these rows."""
        length = self.settings.length
        return {
            "tokens": self.rows.tokens[:, :length].to("cpu", torch.int32),
            "best": self.best[:, :length].to("cpu", torch.int32),
            "is_answer": self.is_answer[:, :length].cpu(),
            "temperatures": self.temperatures[ANSWER].cpu(),
        }
