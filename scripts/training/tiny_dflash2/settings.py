"""Settings of a DFlash2 drafter for the tiny pair's target."""

from dataclasses import dataclass, field
from pathlib import Path

from models.tiny import PAIR_DIR, TARGET_DIR
from training.loop import TrainSettings
from training.tiny import settings as tiny

DRAFTER_CONFIG = tiny.DRAFTER_CONFIG | {
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "dflash_config": tiny.DRAFTER_CONFIG["dflash_config"]
    | {"target_layer_ids": [1, 2]}
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 16},
    # A multiple of 64, as SGLang's CPU engine asks.
    "intermediate_size": 64,
    "is_causal": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
}


@dataclass
class DFlash2Settings(tiny.Settings):
    """Settings of the tiny pair's stages for this drafter. Only the drafter is written."""

    drafter_config: dict = field(default_factory=lambda: DRAFTER_CONFIG)
    max_bytes: int = 1100 * 1000
    generation_batches: int = 16
    generation_seconds: float = 45.0
    drafter: TrainSettings = field(
        default_factory=lambda: TrainSettings(6000, 120.0, 1.5e-3, 200, 0.05, 1000),
    )
    min_accept_length: float = 2.0

    @property
    def target_dir(self) -> Path:
        return TARGET_DIR

    @property
    def prompts_dir(self) -> Path:
        return PAIR_DIR
