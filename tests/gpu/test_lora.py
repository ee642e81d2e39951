"""LoRA adapters in CUDA graphs and bf16: the text is the one without speculation, up to ties.

Five and three requests are replayed in graphs of eight and four, so that padding follows requests with adapters.
"""

import pytest
from engines import greedy, tiny
from support.adapters import ATTENTION, LAYERS, VOCABULARY, adapter
from support.ties import TIE, compare, tokens_per_cycle

ADAPTERS = {"red": ATTENTION, "green": LAYERS, "blue": (*LAYERS, *VOCABULARY)}
FLAGS = {
    "attention_backend": "fa3",
    "lora_paths": [f"{name}={adapter(f'{name}-{len(names)}', names)}" for name, names in ADAPTERS.items()],
    # Requests without an adapter count as one. So a batch has two adapters, and the third one evicts another.
    "max_loras_per_batch": 3,
    "chunked_prefill_size": 128,
}
NEW_TOKENS = 60


def calls(prompts: list[list[int]]) -> list[dict]:
    """Return calls with different adapters and none in one batch."""
    return [
        greedy(prompts[:5], NEW_TOKENS, lora_path=[None, "red", "green", None, "red"], flush=True),
        greedy([sum(prompts[5:8], []), prompts[8], prompts[9]], NEW_TOKENS, lora_path=["blue", None, "green"]),
        # The prompts of the first call again, with other adapters.
        greedy(prompts[:5], NEW_TOKENS, lora_path=["green", None, "blue", "blue", "green"]),
        greedy(prompts[10:18], NEW_TOKENS, lora_path=[None, "red", "green", "blue"] * 2),
    ]


@pytest.mark.gpu
@pytest.mark.group("lora-{backend}")
@pytest.mark.parametrize("shape", ["chains", "trees"])
@pytest.mark.parametrize("backend", ["csgmv", "triton"])
def test_text(backend, shape, engines, prompts):
    asked, flags = calls(prompts), FLAGS | {"lora_backend": backend}
    plain = engines.reference(tiny(f"lora-{backend}-plain", **flags), asked)
    config = tiny(f"lora-{backend}-{shape}", shape, **flags)
    answers = engines.ask(config, asked)

    compared = compare(sum(plain, []), sum(answers, []))
    names = [name for call in asked for name in call["lora_path"]]
    base = [answer for name, answer in zip(names, sum(answers, []), strict=True) if name is None]
    print(f"\n{config}: {compared}, {tokens_per_cycle(base):.2f} tokens per cycle without adapters")
    compared.assert_ties(TIE)
    assert tokens_per_cycle(base) > 3
