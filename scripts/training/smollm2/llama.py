"""SmolLM2 for training: features of many tokens, and decoding in which thousands of rows step together.

transformers' Llama gives the same numbers, but launches too many kernels per step.

Letters in shapes: bs rows, T tokens each, V vocabulary, H hidden size. Other dimensions are spelled out.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from training.smollm2.decode_attention import decode_attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Llama:
    """The target's weights, in bf16 on a GPU and in float32 on a CPU, and its forward without gradients."""

    def __init__(self, folder: Path, device: str):
        config = json.loads((folder / "config.json").read_text())
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        weights = {name: tensor.to(device, dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.device = torch.device(device)
        self.num_layers = config["num_hidden_layers"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [self._fused(weights, f"model.layers.{i}") for i in range(self.num_layers)]
        positions = torch.arange(config["max_position_embeddings"], device=device)
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        angles = positions[:, None] * config["rope_theta"] ** -exponents
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def _fused(weights: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
        """Return one layer's weights. Weights with the same input are concatenated."""
        attention = [weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        return {
            "input_norm": weights[f"{layer}.input_layernorm.weight"],
            "qkv": torch.cat(attention),
            "o": weights[f"{layer}.self_attn.o_proj.weight"],
            "post_norm": weights[f"{layer}.post_attention_layernorm.weight"],
            "gate_up": torch.cat([weights[f"{layer}.mlp.gate_proj.weight"], weights[f"{layer}.mlp.up_proj.weight"]]),
            "down": weights[f"{layer}.mlp.down_proj.weight"],
        }

    @torch.no_grad()
    def features(self, tokens: Tensor, layer_ids: Iterable[int]) -> Tensor:
        """Return the outputs of `layer_ids`, concatenated: tokens [bs, T] int64 -> [bs, T, len(layer_ids) * H]."""

        def attend(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return causal_attention(queries, keys, values)

        outputs = list(self._layers(tokens, slice(0, tokens.shape[1]), attend, max(layer_ids) + 1))
        return torch.cat([outputs[i] for i in layer_ids], dim=-1)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: "Cache") -> None:
        """Fill the cache with the first tokens [bs, T] int64."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.keys[layer, :, :, : tokens.shape[1]] = keys.transpose(1, 2)
            cache.values[layer, :, :, : tokens.shape[1]] = values.transpose(1, 2)
            return causal_attention(queries, keys, values)

        for _output in self._layers(tokens, slice(0, tokens.shape[1]), attend, self.num_layers):
            pass

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, position: Tensor, cache: "Cache") -> Tensor:
        """Decode one step of every row.

        Args:
            tokens: [bs] int64. The tokens at `position`.
            position: [1] int64, on the device.
            cache: has the tokens before `position`.

        Returns:
            [bs, V] float32. Logits of the next tokens.
        """

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.keys[layer].index_copy_(2, position, keys.transpose(1, 2))
            cache.values[layer].index_copy_(2, position, values.transpose(1, 2))
            return decode_attention(queries[:, 0], cache.keys[layer], cache.values[layer], position)[:, None]

        for output in self._layers(tokens[:, None], position, attend, self.num_layers):
            hidden = output
        return self.logits(hidden[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return unrounded logits of the last layer's outputs: [rows, H] -> [rows, V] float32."""
        return head_logits(self.normed(hidden), self.embedding)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the lm_head's input for outputs [..., H] of the last layer."""
        return F.rms_norm(hidden, self.norm.shape, self.norm, self.eps)

    def _layers(self, tokens: Tensor, positions: slice | Tensor, attend: Attend, num_layers: int) -> Iterable[Tensor]:
        """Yield the output of each of the first layers, [bs, T, H]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        num_rotated = self.num_heads + self.num_kv_heads
        x = F.embedding(tokens, self.embedding)
        for i, layer in enumerate(self.layers[:num_layers]):
            h = F.rms_norm(x, layer["input_norm"].shape, layer["input_norm"], self.eps)
            qkv = F.linear(h, layer["qkv"]).unflatten(-1, (-1, self.head_dim))
            rotated = rotate(qkv[:, :, :num_rotated], cos, sin)
            queries, keys = rotated[:, :, : self.num_heads], rotated[:, :, self.num_heads :]
            x = x + F.linear(attend(i, queries, keys, qkv[:, :, num_rotated:]).flatten(2), layer["o"])
            h = F.rms_norm(x, layer["post_norm"].shape, layer["post_norm"], self.eps)
            gate, up = F.linear(h, layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
            yield x


class Cache:
    """Keys and values of all rows: [layers, bs, kv_heads, length, head_dim] each."""

    def __init__(self, llama: Llama, num_rows: int, length: int):
        shape = (llama.num_layers, num_rows, llama.num_kv_heads, length, llama.head_dim)
        # Entries that are not written yet are masked, but must be finite on a CPU.
        self.keys = torch.zeros(shape, dtype=llama.embedding.dtype, device=llama.device)
        self.values = torch.zeros_like(self.keys)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [bs, T, heads, head_dim] by cos, sin [T, 1, head_dim]: HF's half rotation."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend causally: queries [bs, T, heads, head_dim], keys and values [bs, T, kv_heads, head_dim]."""
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Return float32 logits [rows, V]: hidden [rows, H] times head [V, H]. In bf16 the best ones would tie."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, head)
    return torch.mm(hidden, head.t(), out_dtype=torch.float32)
