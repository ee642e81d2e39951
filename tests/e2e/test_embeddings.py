"""Prompts given as embeddings."""

from concurrent.futures import ThreadPoolExecutor

import torch
from oracle import assert_same_cycles
from safetensors.torch import load_file
from serving import Settings

from models.tiny import TARGET_DIR

# On a GPU SGLang passes embeddings to the model in bfloat16, whatever the model's dtype.
DTYPE = (("dtype", "bfloat16"),) if torch.cuda.is_available() else ()
# SGLang's radix cache identifies prompts by their tokens.
SETTINGS = Settings("embeddings", flags=(("disable-radix-cache", True), *DTYPE))


def test_input_embeddings(keeper, prompts, oracle):
    """A prompt's embeddings give the same answer and cycles as its tokens; in float32, those of the oracle."""
    server = keeper.server(SETTINGS, dflash=True)
    embedding = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"].to(torch.float32)
    sampling_params = {"temperature": 0, "max_new_tokens": 50}

    def answer(prompt: dict) -> dict:
        return server.post("/generate", prompt | {"sampling_params": sampling_params})

    def cycles(answer: dict) -> tuple[list[int], int, list[int]]:
        meta_info = answer["meta_info"]
        return answer["output_ids"], meta_info["spec_verify_ct"], meta_info["spec_correct_drafts_histogram"]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda prompt: answer({"input_embeds": embedding[prompt].tolist()}), prompts[:3]))

    for prompt, embedded in zip(prompts, answers):
        assert cycles(embedded) == cycles(answer({"input_ids": prompt}))
        if not DTYPE:
            assert_same_cycles(embedded, oracle.generate(prompt, 50))
    server.wait_until_empty()


def test_embeddings_beside_tokens(keeper, prompts):
    """All requests wait for a long prompt, and the server forms the batches."""
    server = keeper.server(SETTINGS, dflash=True)
    embedding = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"].to(torch.float32)
    sampling_params = {"temperature": 0, "max_new_tokens": 20}
    long = {"input_ids": sum(prompts, [])[:1900]}
    tokens = [{"input_ids": prompt} for prompt in prompts[:8]]
    embedded = [{"input_embeds": embedding[prompt].tolist()} for prompt in prompts[:8]]
    asked = [long, *(prompt for both in zip(tokens, embedded) for prompt in both)]

    with ThreadPoolExecutor(len(asked)) as threads:
        _, *answers = threads.map(
            lambda prompt: server.post("/generate", prompt | {"sampling_params": sampling_params}), asked
        )

    for mine, expected in zip(answers[1::2], answers[::2]):
        # Elsewhere they may depend on the batch.
        assert mine["output_ids"] == expected["output_ids"] or DTYPE
    server.wait_until_empty()
