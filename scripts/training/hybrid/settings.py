"""Settings of the hybrid pair: the smallest models that SGLang's kernels for recurrent layers and attention support."""

from dataclasses import dataclass, field
from pathlib import Path

from models.tiny import PAIR_DIR
from training.loop import TrainSettings
from training.tiny import settings as tiny

HIDDEN_SIZE = 256
# Half of the tiny pair's, so that the embedding has a tenth of the weights.
VOCAB_SIZE = 512

TARGET_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": tiny.EOS_ID,
    "dtype": "bfloat16",
    "eos_token_id": tiny.EOS_ID,
    # Every fourth layer has full attention. SGLang reads this field, transformers reads the types.
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": HIDDEN_SIZE,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    # The sizes of published models, for which SGLang's kernels are made. Two ranks have a key head each.
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
    "max_position_embeddings": tiny.MAX_POSITIONS,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "pad_token_id": tiny.EOS_ID,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": tiny.ROPE_THETA, "rope_type": "default"},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

DRAFTER_CONFIG = tiny.DRAFTER_CONFIG | {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
}


@dataclass
class HybridSettings(tiny.Settings):
    """Settings of the tiny pair with other models and limits. Training takes eight minutes on one H100."""

    target_config: dict = field(default_factory=lambda: TARGET_CONFIG)
    drafter_config: dict = field(default_factory=lambda: DRAFTER_CONFIG)
    max_bytes: int = 5900 * 1000
    target: TrainSettings = field(
        default_factory=lambda: TrainSettings(3000, 180.0, 2.5e-3, 100, 0.1, 200),
    )
    # With fewer texts the drafter learns them by heart.
    generation_batches: int = 120
    generation_seconds: float = 110.0
    drafter: TrainSettings = field(
        default_factory=lambda: TrainSettings(6000, 150.0, 1.5e-3, 200, 0.1, 500),
    )
    min_accept_length: float = 2.0

    @property
    def prompts_dir(self) -> Path:
        return PAIR_DIR
