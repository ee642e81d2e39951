"""The drafter: SGLang's Qwen3 layers with DFlash's masks, fed by the target's embedding, read out by its lm_head.

Shapes: T tokens, bs requests, B rows of a block, H hidden size, F captured target layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding
from sglang.srt.models.qwen3 import Qwen3DecoderLayer
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_dflash.checkpoint.config import Convolutions, DFlashConfig, LayerAttention
from sglang_dflash.checkpoint.tensors import (
    Tensor,
    check_tensors,
    checkpoint_name,
    draft_to_target,
    expected_tensors,
    quantized_shapes,
    spare_tensors,
)
from sglang_dflash.draft.convolutions import BlockConvolution
from sglang_dflash.draft.float8 import Float8Weights, scales_outputs
from sglang_dflash.draft.pairs import CandidateSelector, MarkovHead, build_pairs

# Where a checkpoint's separate projections go in SGLang's fused ones: (checkpoint, fused, shard).
_FUSED = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)


class DFlashDecoderLayer(Qwen3DecoderLayer):
    """A Qwen3 layer whose attention has the mask that the checkpoint gives this layer."""

    def __init__(self, config, layer_id: int, mask: LayerAttention, quant_config, prefix: str) -> None:
        super().__init__(config, layer_id=layer_id, quant_config=quant_config, prefix=prefix)
        attention = self.self_attn
        attention.attn = RadixAttention(
            attention.num_heads,
            attention.head_dim,
            attention.scaling,
            num_kv_heads=attention.num_kv_heads,
            layer_id=layer_id,
            # SGLang counts the keys to the left of the query, DFlash the query too.
            sliding_window_size=-1 if mask.window is None else mask.window - 1,
            attn_type=AttentionType.DECODER if mask.causal else AttentionType.ENCODER_ONLY,
            prefix=add_prefix("self_attn.attn", prefix),
        )


class ConvolvedDecoderLayer(DFlashDecoderLayer):
    """A layer with convolutions around its attention and its MLP."""

    def __init__(
        self, config, layer_id: int, mask: LayerAttention, conv: Convolutions, quant_config, prefix: str
    ) -> None:
        super().__init__(config, layer_id, mask, quant_config, prefix)
        self.attention_conv = BlockConvolution(conv, config.hidden_size, add_prefix("attention_conv", prefix))
        self.mlp_conv = BlockConvolution(conv, config.hidden_size, add_prefix("mlp_conv", prefix))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        # With tensor parallelism `hidden_states` may be a sum that the boundary has yet to complete.
        rows = positions.shape[0] // forward_batch.batch_size
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        # Both sides take their weights from the normed rows, before any convolution.
        weights = self.attention_conv.row_weights(hidden_states)
        hidden_states = self.self_attn(
            positions=positions,
            hidden_states=self.attention_conv.before(hidden_states, weights, rows),
            forward_batch=forward_batch,
        )
        hidden_states = self.attention_conv.after(hidden_states, weights, rows)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)
        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        weights = self.mlp_conv.row_weights(hidden_states)
        hidden_states = self.mlp(self.mlp_conv.before(hidden_states, weights, rows), forward_batch=forward_batch)
        hidden_states = self.mlp_conv.after(hidden_states, weights, rows)
        return self.ffn_boundary.finish(hidden_states, forward_batch)


class DFlashDraftModel(nn.Module):
    """The block path (`forward`) and the inputs of the context path (`project_features`, the layers' k/v weights)."""

    # SGLang reads it to find the layers that a quantised checkpoint names.
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.dflash_config = DFlashConfig.from_dict(config.to_dict(), config._name_or_path)
        num_features = len(self.dflash_config.target_layer_ids) * config.hidden_size
        # Sharded by its inputs and summed over the tensor-parallel ranks. It is half as large as a whole layer of the
        # target: to read all of it would take each rank longer than the sum.
        # Only a checkpoint quantises it. `--speculative-draft-model-quantization` is for the layers.
        self.fc = RowParallelLinear(
            num_features,
            config.hidden_size,
            bias=False,
            quant_config=quant_config if "fc" in quantized_shapes(self.dflash_config) else None,
            prefix=add_prefix("fc", prefix),
        )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        with layer_stack():
            self.layers = nn.ModuleList(
                self._new_layer(i, quant_config, add_prefix(f"layers.{i}", prefix))
                for i in range(len(self.dflash_config.layers))
            )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        draft_vocab_size = self.dflash_config.draft_vocab_size
        if draft_vocab_size is not None:
            self.lm_head = ParallelLMHead(draft_vocab_size, config.hidden_size, prefix=add_prefix("lm_head", prefix))
            self.register_buffer("target_tokens", torch.empty(draft_vocab_size, dtype=torch.int64))
        # Scores of pairs of drafts, if the drafter has them.
        self.pairs: CandidateSelector | MarkovHead | None = None
        if self.dflash_config.pairs is not None:
            name, module = build_pairs(
                self.dflash_config.pairs, config.hidden_size, self.dflash_config.vocab_size, prefix
            )
            self.add_module(name, module)
            # Not as a module: its parameters have one name, that of checkpoints.
            object.__setattr__(self, "pairs", module)
        self._target_embedding: list[nn.Module] = []
        self._embedding_scale = 1.0
        # As blocks have it, scaled; None: the target's.
        self._mask_embedding: torch.Tensor | None = None

    def _new_layer(self, layer_id: int, quant_config, prefix: str) -> DFlashDecoderLayer:
        mask, conv = self.dflash_config.layers[layer_id], self.dflash_config.conv
        if conv is None:
            return DFlashDecoderLayer(self.config, layer_id, mask, quant_config, prefix)
        return ConvolvedDecoderLayer(self.config, layer_id, mask, conv, quant_config, prefix)

    def use_target_embedding(self, embedding: nn.Module, mask_embedding: torch.Tensor | None) -> None:
        """Draft with the target's embedding, which is not registered as a module of the drafter.

        Args:
            embedding: of the target.
            mask_embedding: [H]. The drafter's own row for the mask token; None: the target's.
        """
        self._target_embedding = [embedding]
        # Gemma's module scales the rows of its table by its own factor.
        applied = embedding.embed_scale if isinstance(embedding, Gemma3TextScaledWordEmbedding) else 1.0
        if self.dflash_config.input_embedding_scale != 1.0:
            # The config scales the rows of the table.
            self._embedding_scale = self.dflash_config.input_embedding_scale / applied
        if mask_embedding is not None:
            weight = self.norm.weight
            scaled = mask_embedding * (applied * self._embedding_scale)
            self._mask_embedding = scaled.to(device=weight.device, dtype=weight.dtype)

    def forward_embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of blocks, [bs * B, H].

        SGLang looks for this name: a model that has it gets no `input_embeds` buffer in its CUDA graphs.
        """
        rows = self._target_embedding[0](input_ids)
        rows = rows if self._embedding_scale == 1.0 else rows * self._embedding_scale
        if self._mask_embedding is None:
            return rows
        is_mask = (input_ids == self.dflash_config.mask_token_id)[:, None]
        return torch.where(is_mask, self._mask_embedding, rows)

    @property
    def num_features(self) -> int:
        """F * H, the width of the target's features."""
        return self.fc.input_size

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Project target features, [T, F * H], to the input of every layer's k and v projections, [T, H]."""
        shard_size = self.fc.input_size_per_partition
        rank, _ = get_group_rank_size(self.fc.tp_group)
        shard = features[:, rank * shard_size :][:, :shard_size]
        return self.hidden_norm(self.fc(shard)[0])

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the window in SGLang's terms: the keys to the left of the query."""
        window = self.dflash_config.window
        return None if window is None else window - 1

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Run the block path.

        Args:
            input_ids: [bs * B] int64, per request the bonus token and B - 1 mask tokens.
            positions: [bs * B] int64, true positions.

        Returns:
            `hidden_states` [bs * B, H] after the final norm; row j of a block predicts its own token.
        """
        hidden_states = self.forward_embed(input_ids)
        residual_batch.start(forward_batch)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states, forward_batch)
        hidden_states = residual_batch.final_norm(hidden_states, forward_batch, self.norm)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint.

        Raises:
            ConfigError: listing every tensor that is wrong.
        """
        config = self.dflash_config
        expected, spare = expected_tensors(config), spare_tensors(config)
        float8 = Float8Weights(config)
        params = dict(self.named_parameters())
        found: list[Tensor] = []
        vocabulary: dict[str, torch.Tensor] = {}
        for full_name, tensor in weights:
            found.append(Tensor(full_name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
            name = checkpoint_name(full_name)
            tensor = tensor if tensor.shape else tensor[None]
            if tensor.shape != (spare | expected).get(name):
                continue
            if name in ("d2t", "t2d"):
                vocabulary[name] = tensor
            elif name in expected:
                for own_name, own in float8.to_load(name, tensor):
                    _load(params, own_name, self._scaled(own_name, own))
        check_tensors(config, found)
        if config.draft_vocab_size is not None:
            self.target_tokens.copy_(draft_to_target(vocabulary["d2t"], vocabulary.get("t2d"), config))

    def _scaled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with `attention_value_scale` in it. Both paths compute values with these weights."""
        factor = self.dflash_config.attention_value_scale
        if factor == 1.0 or ".v_proj." not in name or not scales_outputs(name, tensor):
            return tensor
        return tensor.float() * factor


def _load(params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> None:
    for separate, fused, shard in _FUSED:
        if name.startswith("layers.") and f".{separate}." in name:
            param = params[name.replace(separate, fused)]
            param.weight_loader(param, tensor, shard)
            return
    param = params[name]
    loader = getattr(param, "weight_loader", default_weight_loader)
    loader(param, tensor)
