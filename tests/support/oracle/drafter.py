"""The DFlash drafter in plain torch: Qwen3 layers over target features (DFlash paper, z-lab checkpoints).

Letters in shapes: bs sequences (or 1), T context tokens, A blocks of W tokens each, V vocabulary, H hidden size.
L stands for tokens of any kind. Other dimensions are spelled out.

Two paths share the weights of every layer:

* context path: target features -> fc -> hidden_norm -> k_proj / v_proj -> k_norm -> RoPE. It computes only keys and
  values, so the context of a growing sequence is append-only.
* block path: an ordinary Qwen3 layer whose tokens attend to the context and to their own block.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.oracle.parts import BlockConv, CandidateSelector, MarkovHead
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LayerKV = tuple[Tensor, Tensor]
# Keys that a token of a block sees: [bs, 1, A * W, T + A * W] bool, or a mask of `flex_attention` for compiled
# training.
Mask = Tensor | BlockMask


@dataclass(frozen=True)
class ReferenceConfig:
    """Fields of a `config.json` that shape the drafter. `rope` is the same config, for transformers' RoPE.

    Attributes:
        block_size: verified tokens of a block, with the bonus token.
        sample_from_anchor: whether the bonus token's row predicts the first draft. Then the drafter has one row less.
        conv: taps and group size; None: there are no convolutions.
        selector: rank and number of candidates; None: there is no selector.
        markov: rank, and whether it is gated; None: there is no Markov head.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Qwen3Config
    attention_bias: bool
    input_embedding_scale: float
    attention_value_scale: float
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    sample_from_anchor: bool
    conv: tuple[int, int] | None
    selector: tuple[int, int] | None
    markov: tuple[int, bool] | None
    output_multiplier: float
    final_logit_softcapping: float | None

    @property
    def draft_rows(self) -> int:
        return self.block_size - self.sample_from_anchor

    @classmethod
    def from_dict(cls, config: dict) -> "ReferenceConfig":
        """Read a `config.json` of z-lab, speculators or DeepSpec.

        `use_sliding_window: false`, or no `layer_types`, makes every layer full. `is_causal` is None if the config has
        none. Then full layers are bidirectional in the block, and sliding layers are causal.
        """
        if "speculators_model_type" in config:
            config = _from_speculators(config)
        elif config["architectures"] == ["Qwen3DSparkModel"]:
            config = config | {"dflash_config": {"sample_from_anchor": True}}
        own = config | {name: value for name, value in config["dflash_config"].items() if value is not None}
        num_layers = config["num_hidden_layers"]
        layer_types = config.get("layer_types")
        if not config.get("use_sliding_window", True) or layer_types is None:
            layer_types = ["full_attention"] * num_layers
        if len(layer_types) != num_layers:
            raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
        target_layer_ids = own.get("target_layer_ids")
        if target_layer_ids is None:
            last, count = own["num_target_layers"] - 3, num_layers
            spaced = [round(1 + i * (last - 1) / (count - 1)) for i in range(count)] if count > 1 else None
            target_layer_ids = spaced or [own["num_target_layers"] // 2]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=num_layers,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=Qwen3Config.from_dict(config),
            attention_bias=config.get("attention_bias", False),
            input_embedding_scale=own.get("input_embedding_scale", 1.0),
            attention_value_scale=own.get("attention_value_scale", 1.0),
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
            # Where the bonus token's row predicts, the field counts drafts.
            block_size=own["block_size"] + own.get("sample_from_anchor", False),
            mask_token_id=own["mask_token_id"],
            target_layer_ids=tuple(target_layer_ids),
            layer_types=tuple(layer_types),
            sliding_window=config.get("sliding_window"),
            is_causal=own.get("is_causal"),
            sample_from_anchor=own.get("sample_from_anchor", False),
            conv=(own["conv_kernel_size"], own["conv_group_size"]) if "conv_kernel_size" in own else None,
            selector=(own["selector_rank"], own["selector_top_k"]) if "selector_rank" in own else None,
            markov=(own["markov_rank"], own.get("markov_head_type") == "gated") if own.get("markov_rank") else None,
            output_multiplier=own.get("output_multiplier", 1.0),
            final_logit_softcapping=own.get("final_logit_softcapping"),
        )


def _from_speculators(config: dict) -> dict:
    dflash_config = {
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
        "is_causal": False if config["sliding_window_non_causal"] else None,
    }
    optional = ("sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    optional += ("markov_rank", "markov_head_type")
    dflash_config |= {name: config[name] for name in optional if name in config}
    layers = config["transformer_layer_config"]
    return layers | {"draft_vocab_size": config["draft_vocab_size"], "dflash_config": dflash_config}


def block_masks(config: ReferenceConfig, context_positions: Tensor, block_positions: Tensor) -> dict[str, Tensor]:
    """Return the keys that every token of a block sees, for each kind of layer in the drafter.

    A token sees the context strictly before its block's first position (the anchor), and its own block. With one block
    after the whole context this is the mask of decoding; with many it is the mask of training. `is_causal` hides later
    positions. A sliding window keeps keys in (p - window, p], or without causality those with |p - key| < window.

    Args:
        config: of the drafter.
        context_positions: [bs, T] int64.
        block_positions: [bs, A, W] int64; `[..., 0]` are the anchors.

    Returns:
        By layer type, [bs, 1, A * W, T + A * W] bool, True = visible. Keys are the context, then the blocks.
    """
    _, num_blocks, block_size = block_positions.shape
    row_positions = block_positions.flatten(1)
    row_anchors = block_positions[..., :1].expand_as(block_positions).flatten(1)
    row_blocks = torch.arange(num_blocks, device=row_positions.device).repeat_interleave(block_size)

    before_anchor = context_positions[:, None, :] < row_anchors[:, :, None]
    same_block = (row_blocks[:, None] == row_blocks[None, :]).expand(len(row_positions), -1, -1)
    visible = torch.cat([before_anchor, same_block], dim=-1)
    key_positions = torch.cat([context_positions, row_positions], dim=1)
    distance = row_positions[:, :, None] - key_positions[:, None, :]

    masks = {}
    for layer_type in set(config.layer_types):
        is_sliding = layer_type == "sliding_attention"
        is_causal = is_sliding if config.is_causal is None else config.is_causal
        mask = visible
        if is_causal:
            mask = mask & (distance >= 0)
        if is_sliding:
            mask = mask & (distance.abs() < config.sliding_window)
        masks[layer_type] = mask[:, None]
    return masks


class RMSNorm(nn.Module):
    """RMSNorm as HF's Qwen3 computes it: normalisation in float32, weight in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rope_cos_sin(positions: Tensor, config: Qwen3Config) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of neox-style RoPE, with the config's scaling.

    Args:
        positions: [bs, L] int64.
        config: of the drafter.

    Returns:
        cos, sin: [bs, 1, L, head_dim] float32. Each frequency occurs in both halves.
    """
    rope_type, scale = config.rope_parameters["rope_type"], 1.0
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
        frequencies = config.rope_parameters["rope_theta"] ** -exponents
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [bs, heads, L, head_dim] by cos and sin [bs, 1, L, head_dim], in x's dtype: HF's half rotation."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class DFlashAttention(nn.Module):
    """Qwen3 attention whose keys and values are those of the context, then those of the block."""

    def __init__(self, config: ReferenceConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.value_scale = config.attention_value_scale
        self.queries_per_kv = config.num_attention_heads // config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def split_heads(self, x: Tensor) -> Tensor:
        """Split [bs, L, heads * head_dim] into [bs, L, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def project_kv(self, x: Tensor, cos: Tensor, sin: Tensor) -> LayerKV:
        """Return rotated keys and values [bs, kv_heads, L, head_dim] each, for x [bs, L, H]."""
        keys = self.k_norm(self.split_heads(self.k_proj(x))).transpose(1, 2)
        values = self.split_heads(self.v_proj(x)).transpose(1, 2) * self.value_scale
        return apply_rope(keys, cos, sin), values

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context_kv: LayerKV, mask: Mask) -> Tensor:
        """Return [bs, A * W, H] for x of that shape and context_kv, two of [bs, kv_heads, T, head_dim]."""
        queries = self.q_norm(self.split_heads(self.q_proj(x))).transpose(1, 2)
        queries = apply_rope(queries, cos, sin)
        block_kv = self.project_kv(x, cos, sin)
        keys, values = (
            torch.cat([context, block], dim=2).repeat_interleave(self.queries_per_kv, dim=1)
            for context, block in zip(context_kv, block_kv, strict=True)
        )
        if isinstance(mask, BlockMask):
            # Under autocast, rotated keys are float32.
            out = flex_attention(queries.to(values.dtype), keys.to(values.dtype), values, block_mask=mask)
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    """Qwen3's gated MLP."""

    def __init__(self, config: ReferenceConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    """Qwen3 decoder layer. Its norm applies to the block only, never to the context."""

    def __init__(self, config: ReferenceConfig, layer_type: str):
        super().__init__()
        self.layer_type = layer_type
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = self.mlp_conv = None
        if config.conv is not None:
            self.attention_conv = BlockConv(config.hidden_size, *config.conv)
            self.mlp_conv = BlockConv(config.hidden_size, *config.conv)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context_kv: LayerKV, mask: Mask, rows: int) -> Tensor:
        """Return [bs, A * W, H] for x of that shape, with W = `rows`."""

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, cos, sin, context_kv, mask)

        x = x + _convolved(self.attention_conv, attend, self.input_layernorm(x), rows)
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x), rows)


def _convolved(conv: BlockConv | None, sublayer: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """Return a sublayer's output for x [bs, A * W, H], with the convolutions of its input and output, if any."""
    if conv is None:
        return sublayer(x)
    x = x.unflatten(1, (-1, rows))
    weights = conv.weights(x)
    out = sublayer(conv(x, weights, side=0).flatten(1, 2))
    return conv(out.unflatten(1, (-1, rows)), weights, side=1).flatten(1, 2)


class ReferenceDrafter(nn.Module):
    """The drafter. Embedding and lm_head are the target's, unless the drafter has an lm_head over fewer tokens.

    The module tree gives the tensor names of checkpoints (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...).
    """

    def __init__(self, config: dict):
        super().__init__()
        self.config = ReferenceConfig.from_dict(config)
        num_features = len(self.config.target_layer_ids)
        self.fc = nn.Linear(num_features * self.config.hidden_size, self.config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(self.config, kind) for kind in self.config.layer_types)
        self.norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        # The drafter's own embedding of the mask token, [H]; None: it has the target's.
        self.mask_embedding: Tensor | None = None
        self.candidate_selector = self.markov_head = None
        tokens, hidden = self.config.vocab_size, self.config.hidden_size
        if self.config.selector is not None:
            self.candidate_selector = CandidateSelector(tokens, hidden, *self.config.selector)
        if self.config.markov is not None:
            self.markov_head = MarkovHead(tokens, hidden, *self.config.markov)
        self.has_own_head = self.config.draft_vocab_size < self.config.vocab_size
        if self.has_own_head:
            self.lm_head = nn.Linear(self.config.hidden_size, self.config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.int64))

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "ReferenceDrafter":
        """Load a folder with `config.json` and `model.safetensors`. Every tensor must match by name.

        A checkpoint of speculators or DeepSpec may contain copies of the target's tensors, which are ignored.
        """
        path = Path(path)
        config = json.loads((path / "config.json").read_text())
        drafter = cls(config)
        # A codebook may be stored as the weight of an embedding.
        tensors = {
            name.replace("_codebook.weight", "_codebook"): tensor
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        if "speculators_model_type" in config:
            copies = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d"}
            copies |= set() if drafter.has_own_head else {"lm_head.weight", "d2t"}
            tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
        elif config["architectures"] == ["Qwen3DSparkModel"]:
            copies = ("embed_tokens.", "lm_head.", "confidence_head.")
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(copies)}
        drafter.load_state_dict(tensors)
        if (path / "mask_embedding.pt").exists():
            drafter.mask_embedding = torch.load(path / "mask_embedding.pt", weights_only=True)["embedding"].to(dtype)
        return drafter.to(dtype).eval()

    def project_context(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Compute every layer's context keys and values from target features.

        Args:
            features: [bs, T, len(target_layer_ids) * H]. Outputs of the target layers, concatenated.
            positions: [bs, T] int64. Positions in the text.

        Returns:
            Per layer keys and values, each [bs, kv_heads, T, head_dim]. Concatenation along dim 2 extends the context.
        """
        context = self.hidden_norm(self.fc(features))
        cos, sin = self._rope(positions)
        return [layer.self_attn.project_kv(context, cos, sin) for layer in self.layers]

    def forward(
        self,
        block_embeds: Tensor,
        block_positions: Tensor,
        context_kv: list[LayerKV],
        context_positions: Tensor,
        mask: Mask | None = None,
    ) -> Tensor:
        """Run A blocks of every sequence over its context.

        Args:
            block_embeds: [bs, A, W, H]. The target's embeddings of `[bonus, mask x (W - 1)]`.
            block_positions: [bs, A, W] int64. Positions in the text; `[..., 0]` are the anchors.
            context_kv: per layer two of [bs, kv_heads, T, head_dim], from `project_context`.
            context_positions: [bs, T] int64.
            mask: of all layers; None for :func:`block_masks`.

        Returns:
            [bs, A, W, H] for the target's lm_head. Position i predicts the token at position i itself, or the next one
            with `sample_from_anchor`.
        """
        if mask is None:
            masks = block_masks(self.config, context_positions, block_positions)
        else:
            masks = dict.fromkeys(self.config.layer_types, mask)
        cos, sin = self._rope(block_positions.flatten(1))
        x = block_embeds.flatten(1, 2) * self.config.input_embedding_scale
        for layer, layer_kv in zip(self.layers, context_kv, strict=True):
            x = layer(x, cos, sin, layer_kv, masks[layer.layer_type], block_embeds.shape[2])
        return self.norm(x).view_as(block_embeds)

    def draft_logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        """Return logits [L, V] over `token_ids` for the drafter's outputs [L, H]."""
        logits = self.lm_head(hidden) if self.has_own_head else target_head(hidden.to(target_head.weight.dtype))
        logits, cap = logits * self.config.output_multiplier, self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def pairs(self) -> CandidateSelector | MarkovHead | None:
        """The module that scores pairs of drafts; None: positions are predicted independently."""
        return self.candidate_selector if self.candidate_selector is not None else self.markov_head

    @property
    def token_ids(self) -> Tensor:
        """Return the target's token for each token of the drafter: [V] int64."""
        tokens = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return tokens + self.d2t if self.has_own_head else tokens

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions, self.config.rope)
