"""Shapes of the drafter of SmolLM2-135M-Instruct, and sizes of its training."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from training.loop import TrainSettings

VOCAB_SIZE = 49152
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2
# `<empty_output>`, a token of notebooks that chats do not contain.
MASK_ID = 16
MAX_BYTES = 16 * 2**20

# 16.6 MB in bf16. The tokens of a block exchange information once per layer, so three layers with narrow MLPs are
# better than two with MLPs of the target's size.
DRAFTER_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": TURN_START_ID,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [4, 12, 20, 28]},
    "dtype": "bfloat16",
    "eos_token_id": TURN_END_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.02,
    "intermediate_size": 832,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 8192,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 9,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "num_target_layers": 30,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

# Each stage has its own random numbers (`step_generator`).
GENERATE_STAGE, DRAFTER_STAGE, POOL_STAGE = range(3)


@dataclass
class Settings:
    """All sizes of a run; batch sizes are per GPU. The defaults take fifteen minutes on one H200."""

    work: Path
    out: Path
    report: Path
    device: str
    seed: int
    # The GGUF file of the target, or the wheel that contains it.
    source: Path | None
    # A drafter to continue from, as written to `out/drafter`.
    init: Path | None
    # Content of the drafter's `config.json`.
    drafter_config: dict = field(default_factory=lambda: DRAFTER_CONFIG)

    # Conversations: rows of `length` tokens, `generation_batch` at a time.
    length: int = 1024
    generation_batch: int = 2048
    generation_seconds: float = 130.0
    # Most tokens of a user's first words, which are given.
    max_opening_tokens: int = 24
    # Longer turns are ended.
    max_user_tokens: int = 200
    max_answer_tokens: int = 400
    # Temperatures of users' turns, and the temperatures of answers with their shares.
    user_temperatures: tuple[float, float] = (0.7, 1.0)
    answer_temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.6, 0.1), (0.8, 0.1), (1.0, 0.2))
    held_out_share: float = 0.1

    drafter_batch: int = 16
    anchors: int = 96
    # Rows in a pool (5.9 MB each), and the average number of uses of a row before the next pool.
    pool_rows: int = 4096
    pool_uses: int = 8
    # Share of blocks that are cut to a random size, as users may cut all; share of tokens that reach the lm_head.
    cut_share: float = 0.25
    head_share: float = 0.6
    # Every `long_every`-th step has fewer and longer rows: conversations one after another.
    long_every: int = 16
    long_batch: int = 2
    long_parts: int = 8
    long_anchors: int = 384
    validation_rows: int = 64
    loss_gamma: float = 7.0
    # Weight of the target's distribution in the loss; its argmax has the rest.
    soft_share: float = 0.5
    drafter: TrainSettings = field(
        default_factory=lambda: TrainSettings(40_000, 600.0, 2.5e-3, 300, 0.05, 1000, muon=True)
    )

    eval_prompts: int = 200
    eval_tokens: int = 256
    # Of the shipped prompts, and tokens of their answers at which drafts are recorded.
    recorded_prompts: int = 32
    recorded_tokens: int = 128
    # Tokens per greedy cycle of chains over all shipped prompts (scripts/results/smollm2-texts_h100_2026-11-25.md).
    recorded_length: float = 3.23
    long_prompts: int = 24
    long_prompt_tokens: tuple[int, int] = (3800, 7800)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Settings":
        """Return the settings of a command line."""
        settings = cls(args.work, args.out, args.report, args.device, args.seed, args.source, args.init)
        if args.smoke:
            settings.shrink_for_smoke()
        settings.generation_seconds = args.generation_seconds or settings.generation_seconds
        settings.drafter.steps = args.drafter_steps or settings.drafter.steps
        settings.drafter.max_seconds = args.drafter_seconds or settings.drafter.max_seconds
        settings.drafter.peak_lr = args.drafter_lr or settings.drafter.peak_lr
        settings.eval_prompts = args.eval_prompts or settings.eval_prompts
        settings.eval_tokens = args.eval_tokens or settings.eval_tokens
        return settings

    @property
    def target_dir(self) -> Path:
        return self.work / "target"

    @property
    def drafter_dir(self) -> Path:
        return self.out / "drafter"

    @property
    def drafters(self) -> dict[str, Path]:
        """Folders of the drafters to evaluate, by name, on the same texts. The first one is the pair's."""
        return {"drafter": self.drafter_dir}

    @property
    def prompts_dir(self) -> Path:
        """The pair with whose prompts this one is evaluated."""
        return self.out

    def shrink_for_smoke(self) -> None:
        """Use tiny sizes that run every stage on a CPU. The models keep their shapes."""
        self.length, self.generation_batch, self.generation_seconds = 96, 8, 1.0
        self.max_opening_tokens, self.max_user_tokens, self.max_answer_tokens = 6, 24, 24
        self.drafter_batch, self.anchors = 2, 3
        self.pool_rows, self.pool_uses = 4, 2
        self.long_every, self.long_batch, self.long_parts, self.long_anchors = 4, 1, 2, 4
        self.validation_rows = 2
        self.drafter = TrainSettings(20, 60.0, 1e-3, 4, 0.05, 20, muon=True)
        self.eval_prompts, self.eval_tokens, self.long_prompts = 1, 12, 1
        self.long_prompt_tokens = (40, 60)
