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
    """A prompt's embeddings give the same answer as its tokens; in float32, that of the oracle.

    Drafts do not know the text of embeddings, so the cycles differ.
    """
    server = keeper.server(SETTINGS, dflash=True)
    embedding = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"].to(torch.float32)
    sampling_params = {"temperature": 0, "max_new_tokens": 50}

    def answer(prompt: dict) -> dict:
        return server.post("/generate", prompt | {"sampling_params": sampling_params})

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda prompt: answer({"input_embeds": embedding[prompt].tolist()}), prompts[:3]))

    for prompt, embedded in zip(prompts, answers):
        of_tokens = answer({"input_ids": prompt})
        assert embedded["output_ids"] == of_tokens["output_ids"]
        assert embedded["meta_info"]["spec_verify_ct"] < 0.8 * len(embedded["output_ids"])
        if not DTYPE:
            assert_same_cycles(of_tokens, oracle.generate(prompt, 50))
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
