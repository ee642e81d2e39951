"""Bad requests by the hundred, beside good ones: the good answers are those of a quiet server, and nothing lingers."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import REQUESTS, assert_same_answers

VOCAB_SIZE = 1024

BAD = [
    {},
    {"text": 5},
    {"text": ""},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": "abc"},
    {"input_ids": [5, VOCAB_SIZE]},
    {"input_ids": [-1]},
    {"input_ids": [2**40]},
    {"input_ids": [5] * 5000},
    {"text": "x", "sampling_params": 7},
    {"text": "x", "custom_logit_processor": "garbage"},
    {"text": "x", "return_routed_experts": True},
    {"text": "x", "return_logprob": True, "top_logprobs_num": 10**6},
    {"text": "x", "return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]},
    {"text": "x", "lora_path": "none"},
    {"text": "x", "session_params": {"id": "none"}},
    *(
        {"text": "x", "sampling_params": params}
        for params in (
            {"n": 10**9},
            {"n": -1},
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_k": 2**40},
            {"min_p": 3},
            {"max_new_tokens": -5},
            {"max_new_tokens": 10**9},
            {"max_new_tokens": 1.5},
            {"min_new_tokens": 50, "max_new_tokens": 5},
            {"frequency_penalty": 9},
            {"repetition_penalty": 0},
            {"logit_bias": {"99999": 1}},
            {"stop_regex": "("},
            {"regex": "(("},
            {"regex": "a", "json_schema": "{}"},
            {"json_schema": "{"},
            {"ebnf": "???"},
            {"nonsense": 1},
        )
    ),
]
# Grammars that are well formed and that no answer of the model ends.
HOPELESS = [
    {"regex": "[^\\x00-\\U0010FFFF]"},
    {"regex": "(zq){300}"},
    {"json_schema": '{"type": "integer", "minimum": 5}'},
]


@pytest.mark.parametrize("settings", [REQUESTS], indirect=True, ids=str)
def test_300_bad_requests(pair, prompts):
    chance = random.Random(0)
    good = [
        {"input_ids": prompts[i % 60], "max_new_tokens": 60, "ignore_eos": True}
        | ({"presence_penalty": 0.5} if i % 5 == 0 else {})
        for i in range(40)
    ]
    quiet = pair.dflash.generate_concurrently(good)
    pair.dflash.flush_cache()

    def be_bad(i):
        kind = i % 10
        if kind < 7:
            return pair.dflash.try_post("/generate", chance.choice(BAD)).status_code
        if kind == 7:
            hopeless = {"temperature": 0, "max_new_tokens": 30} | chance.choice(HOPELESS)
            return pair.dflash.try_post("/generate", {"text": "x", "sampling_params": hopeless}).status_code
        # Hang up, in the middle of the answer or before it.
        stream = pair.dflash.stream(prompts[i % 60], max_new_tokens=400, ignore_eos=True, temperature=i % 2)
        for _ in range(chance.randrange(4)):
            next(stream)
        stream.close()
        return None

    with ThreadPoolExecutor(24) as threads:
        answers = threads.submit(pair.dflash.generate_concurrently, good)
        statuses = list(threads.map(be_bad, range(300)))

    assert_same_answers(answers.result(), quiet)
    assert all(status in (400, 422) for i, status in enumerate(statuses) if i % 10 < 7)
    assert all(status in (200, 400) for status in statuses[7::10])
    pair.dflash.wait_until_empty()
    assert pair.dflash.is_running()
