"""Settings that the stages share: model shapes, sizes of each stage, and the folders for their output."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from training.loop import TrainSettings

EOS_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"
EOS_ID = 0
MASK_ID = 1
VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
ROPE_THETA = 10000.0

# Each stage has its own random numbers (`step_generator`).
TARGET_STAGE, GENERATE_STAGE, DRAFTER_STAGE = range(3)

TARGET_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": EOS_ID,
    "dtype": "bfloat16",
    "eos_token_id": EOS_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 448,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": MAX_POSITIONS,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": EOS_ID,
    "rms_norm_eps": 1e-6,
    # transformers 5 reads rope_parameters, older versions read rope_theta.
    "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
    "rope_theta": ROPE_THETA,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

DRAFTER_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": EOS_ID,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]},
    "dtype": "bfloat16",
    "eos_token_id": EOS_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": MAX_POSITIONS,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": ROPE_THETA,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": VOCAB_SIZE,
}


@dataclass
class Settings:
    """Models of a pair, and all sizes of a run. The defaults train the tiny pair on one H100 in eight minutes.

    Attributes:
        target_config, drafter_config: content of their `config.json`.
        max_bytes: size limit of the pair's files.
    """

    work: Path
    out: Path
    report: Path
    device: str
    seed: int
    target_config: dict = field(default_factory=lambda: TARGET_CONFIG)
    drafter_config: dict = field(default_factory=lambda: DRAFTER_CONFIG)
    max_bytes: int = 8 * 2**20
    max_files: int | None = None
    sequence_length: int = 2048
    target_batch: int = 16
    # Batches of held-out text that evaluate the target; None for all.
    held_out_batches: int | None = None
    target: TrainSettings = field(
        default_factory=lambda: TrainSettings(700, 120.0, 2.5e-3, 100, 0.1, 50),
    )
    # Generated sequences: a prompt, then the target's greedy continuation up to `generated_length`.
    generated_length: int = 384
    generation_batch: int = 2048
    generation_batches: int = 30
    generation_seconds: float = 75.0
    drafter_batch: int = 64
    anchors: int = 24
    # Every `corpus_every`-th drafter step reads corpus text at the full sequence length instead.
    corpus_every: int = 6
    corpus_batch: int = 8
    corpus_anchors: int = 96
    loss_gamma: float = 7.0
    drafter: TrainSettings = field(
        default_factory=lambda: TrainSettings(6000, 400.0, 1.5e-3, 200, 0.05, 500),
    )
    eval_prompts: int = 60
    eval_tokens: int = 128
    exact_prompts: int = 6
    min_accept_length: float = 2.5

    @property
    def target_dir(self) -> Path:
        return self.out / "target"

    @property
    def drafter_dir(self) -> Path:
        return self.out / "drafter"

    @property
    def prompts_dir(self) -> Path:
        """The pair with whose prompts this one is evaluated."""
        return self.out

    @property
    def vocab_size(self) -> int:
        return self.target_config["vocab_size"]

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Settings":
        """Settings from the command line; creates the folders."""
        settings = cls(args.work, args.out, args.report, args.device, args.seed)
        if args.device == "cpu":
            settings.shrink_for_cpu()
        if args.smoke:
            settings.shrink_for_smoke()
        settings.target.steps = args.target_steps or settings.target.steps
        settings.target.max_seconds = args.target_seconds or settings.target.max_seconds
        settings.generation_seconds = args.generation_seconds or settings.generation_seconds
        settings.drafter.steps = args.drafter_steps or settings.drafter.steps
        settings.drafter.max_seconds = args.drafter_seconds or settings.drafter.max_seconds
        return settings

    def shrink_for_cpu(self) -> None:
        """Use such small steps that a core runs a thousand in some minutes. The resulting pair is worse."""
        self.sequence_length, self.target_batch = 256, 4
        self.held_out_batches = 50
        self.target.eval_every = self.drafter.eval_every = 500
        self.generated_length, self.generation_batch = 192, 128
        self.drafter_batch, self.anchors = 8, 8
        self.corpus_batch, self.corpus_anchors = 2, 12

    def shrink_for_smoke(self) -> None:
        """Use tiny sizes that run every stage on a CPU. The models keep their shapes."""
        self.max_files = 30
        self.sequence_length, self.target_batch = 256, 4
        self.held_out_batches = 2
        self.target = TrainSettings(20, 60.0, 3e-3, 4, 0.1, 10)
        self.generated_length, self.generation_batch, self.generation_batches = 96, 8, 3
        self.drafter_batch, self.anchors = 4, 3
        self.corpus_every, self.corpus_batch, self.corpus_anchors = 3, 1, 4
        self.drafter = TrainSettings(20, 60.0, 2e-3, 4, 0.05, 10)
        self.eval_prompts, self.eval_tokens, self.exact_prompts = 4, 32, 2
        self.min_accept_length = 1.0
