"""Log probabilities and counters are of the tokens of an answer, and of no others."""

import pytest
from serving import Settings
from test_metrics import exported

# Under overlap scheduling, a cycle may run for a request that has ended.
CONTEXT = 256
SETTINGS = Settings(
    "auto-truncate",
    flags=(("allow-auto-truncate", True), ("context-length", CONTEXT)),
    dflash_flags=(("enable-metrics", True),),
)
pytestmark = pytest.mark.parametrize("settings", [SETTINGS], indirect=True, ids=str)


def test_no_token(pair, prompts):
    server = pair.dflash
    for stream in (False, True):
        body = {
            "input_ids": prompts[0],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": 0,
            "stream": stream,
        }
        info = (list(server.post_stream("/generate", body))[-1] if stream else server.post("/generate", body))[
            "meta_info"
        ]
        assert info["completion_tokens"] == 0
        assert info["output_token_logprobs"] == [] == info.get("output_top_logprobs", [])
        assert len(info["input_token_logprobs"]) == len(prompts[0])


def test_scores_of_no_token(pair, prompts):
    """`/v1/score` asks for no token, and for the log probabilities of some."""
    scores = pair.dflash.post(
        "/v1/score",
        {
            "query": prompts[0][:9],
            "items": [prompts[1][:5]],
            "label_token_ids": [5, 6],
            "apply_softmax": True,
            "model": "x",
        },
    )["scores"]
    assert len(scores) == 1
    assert sum(scores[0]) == pytest.approx(1)


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 50])
def test_a_prompt_that_fills_the_context(pair, prompts, length):
    prompt = (sum(prompts, []) * 3)[:length]
    answer = pair.dflash.post(
        "/v1/completions",
        {"model": "x", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0},
    )
    usage, logprobs = answer["usage"], answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] + usage["completion_tokens"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"])


def test_counted_tokens(pair, prompts):
    server = pair.dflash

    def counted() -> float:
        samples = exported(server, "sglang:realtime_tokens_total")
        return sum(sample.value for sample in samples if sample.labels["mode"] == "decode")

    before = counted()
    answers = server.generate_concurrently(
        [{"input_ids": prompt, "max_new_tokens": 20 + i, "ignore_eos": True} for i, prompt in enumerate(prompts[:6])]
    )
    server.wait_until_empty()

    # The prefill's token is none of decoding.
    written = sum(len(answer["output_ids"]) - 1 for answer in answers)
    assert counted() - before == written
