"""Prompts given as embeddings."""

from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file
from serving import Settings

from sglang_dflash.tiny_pair import TARGET_DIR

# On a GPU SGLang hands embeddings to the model in bfloat16, whatever the model's dtype.
DTYPE = (("dtype", "bfloat16"),) if torch.cuda.is_available() else ()
# SGLang's radix cache knows prompts by their tokens.
SETTINGS = Settings("embeddings", flags=(("disable-radix-cache", True), *DTYPE))


def test_input_embeddings(keeper, prompts):
    """The answer to a prompt's embeddings, and every cycle of it, is that to its tokens."""
    server = keeper.server(SETTINGS, dflash=True)
    embedding = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"].to(torch.float32)
    sampling_params = {"temperature": 0, "max_new_tokens": 50}

    def answer(prompt: dict) -> tuple[list[int], int, list[int]]:
        found = server.post("/generate", prompt | {"sampling_params": sampling_params})
        meta_info = found["meta_info"]
        return found["output_ids"], meta_info["spec_verify_ct"], meta_info["spec_correct_drafts_histogram"]

    with ThreadPoolExecutor(3) as threads:
        embedded = list(threads.map(lambda prompt: answer({"input_embeds": embedding[prompt].tolist()}), prompts[:3]))

    assert embedded == [answer({"input_ids": prompt}) for prompt in prompts[:3]]
    server.wait_until_empty()
