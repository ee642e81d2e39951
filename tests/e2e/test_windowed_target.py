"""A target with sliding-window layers: verification sees exactly their windows, whose slots are evicted in decode."""

import re

import pytest
import torch
from serving import SYNC, TREES_ON_A_GPU, Settings, trees
from support.windowed import BLOCK_SIZE, WINDOW, write_windowed_pair
from transformers import AutoModelForCausalLM

# SGLang's default of SGLANG_SWA_EVICTION_INTERVAL.
EVICTION_INTERVAL = 128


# The pool of the sliding layers is a small part of the other pool, and just large enough for the requests below. There
# is no warm-up request: it is text, whose tokens this vocabulary does not have.
FLAGS = (
    ("max-total-tokens", 20000),
    ("swa-full-tokens-ratio", 0.1),
    ("decode-log-interval", 5),
    ("skip-server-warmup", True),
)
# Name, and flags of the server with DFLASH.
LAYOUTS = [
    ("windowed", (("chunked-prefill-size", 128),)),
    pytest.param(
        ("windowed-trees", (("chunked-prefill-size", 128), *trees(4, 20))), marks=pytest.mark.cpu(reason=TREES_ON_A_GPU)
    ),
    ("windowed-page16-sync", (("page-size", 16), ("chunked-prefill-size", 64), SYNC)),
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return write_windowed_pair(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda param: param[0])
def settings(request, checkpoints):
    """Return settings that contain the checkpoints' paths, in place of the common ones."""
    name, flags = request.param
    target, drafter = checkpoints
    return Settings(
        name,
        flags=(*FLAGS, ("model-path", str(target))),
        dflash_flags=(
            ("speculative-draft-model-path", str(drafter)),
            ("speculative-dflash-block-size", BLOCK_SIZE),
            *flags,
        ),
    )


@pytest.fixture(scope="module")
def reference(checkpoints):
    """Return transformers' own target, whose windows are exact."""
    return AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float64, attn_implementation="eager").eval()


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Return tokens of the target's small vocabulary in an order that it cannot predict."""
    return [2 + (start + 7 * i + i * i // 5) % 14 for i in range(length)]


def test_concurrent_requests_over_several_windows(pair, reference):
    lengths = [1, 17, WINDOW - 1, WINDOW, WINDOW + 1, 100, 130, 200]
    requests = [
        {"input_ids": prompt_of(length, i), "max_new_tokens": 4 * WINDOW + 9 * i, "ignore_eos": True}
        for i, length in enumerate(lengths)
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    for request, answer in zip(requests, answers):
        prompt, tokens = request["input_ids"], answer["output_ids"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert cycles < 0.97 * sum(request["max_new_tokens"] for request in requests), "hardly a draft was accepted"
    assert len({tuple(answer["output_ids"][-2 * WINDOW :]) for answer in answers}) == len(answers), "answers repeat"


def test_a_long_answer_leaves_the_pool_of_the_sliding_layers_flat(pair):
    """The pool never holds more than the prompt, a window and the slots that wait for eviction."""
    before = len(pair.dflash.log())
    prompt = prompt_of(60)

    answer = pair.lossless(lambda server: server.generate(prompt, max_new_tokens=900, ignore_eos=True))

    assert len(answer["output_ids"]) == 900 and answer["meta_info"]["num_retractions"] == 0
    in_use = [int(tokens) for tokens in re.findall(r"#swa token: (\d+)", pair.dflash.log()[before:])]
    page_size = dict(pair.dflash.settings.dflash_flags).get("page-size", 1)
    assert len(in_use) > 40
    assert max(in_use) <= len(prompt) + WINDOW + EVICTION_INTERVAL + 2 * (pair.dflash.settings.num_rows + page_size)
