"""Prompts given as embeddings."""

from concurrent.futures import ThreadPoolExecutor

import torch
from oracle import assert_same_cycles
from safetensors.torch import load_file
from serving import Settings

from sglang_dflash.tiny_pair import TARGET_DIR

# SGLang's radix cache knows prompts by their tokens.
SETTINGS = Settings("embeddings", flags=(("disable-radix-cache", True),))


def test_input_embeddings(keeper, prompts, oracle):
    server = keeper.server(SETTINGS, dflash=True)
    embedding = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"].to(torch.float32)
    requests = [
        {"input_embeds": embedding[prompt].tolist(), "sampling_params": {"temperature": 0, "max_new_tokens": 50}}
        for prompt in prompts[:3]
    ]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda request: server.post("/generate", request), requests))

    for prompt, answer in zip(prompts, answers):
        assert_same_cycles(answer, oracle.generate(prompt, 50))
    server.wait_until_empty()
