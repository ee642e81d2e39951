"""Two tensor-parallel ranks, and two replicas, on the CPU: the text is one rank's without speculation.

Two ranks sum in another order than one, so their float32 logits differ in the last bits. The tiny pair's best two
logits are hardly ever that close. So its answers are the same, and a difference here is an error.
"""

import base64
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from serving import DEFAULT, RETRACT, SMALL_POOL, TWO_CORES, Settings, assert_same_answers, trees, with_plugin

from models.tiny import TARGET_DIR

pytestmark = pytest.mark.cpu(reason="two ranks need two GPUs; see tests/gpu")

# Compared with one rank without speculation.
TWO_RANKS = Settings("tp2", flags=(("tp-size", 2),), env=TWO_CORES, plain=DEFAULT)
SMALL_POOL_TWO_RANKS = Settings(
    "tp2-small-pool", flags=(("tp-size", 2), *SMALL_POOL), env=TWO_CORES + RETRACT, plain=DEFAULT
)
LOGGED_TWO_RANKS = Settings("tp2-logged", flags=(("tp-size", 2),), env=TWO_CORES + with_plugin("gather_check"))
DRAWING_TWO_RANKS = Settings(
    "tp2-trees-drawing",
    flags=(("tp-size", 2),),
    dflash_flags=trees(8),
    env=TWO_CORES + with_plugin("draws_check"),
)
TWO_REPLICAS = Settings("dp2", flags=(("dp-size", 2),), env=TWO_CORES, plain=DEFAULT)


@pytest.mark.parametrize("settings", [TWO_RANKS], indirect=True, ids=str)
def test_cycles_accept_drafts(pair, prompts):
    answer = pair.lossless(lambda server: server.generate(prompts[3], max_new_tokens=100, ignore_eos=True))

    assert pair.dflash.get("/server_info")["tp_size"] == 2
    assert answer["meta_info"]["spec_verify_ct"] < 50


@pytest.mark.parametrize("settings", [TWO_RANKS], indirect=True, ids=str)
def test_200_mixed_requests(pair, prompts):
    requests = [
        {"input_ids": prompts[i % 60][: 1 + i // 2], "max_new_tokens": 1 + i % 29, "ignore_eos": i % 3 > 0}
        for i in range(200)
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))


@pytest.mark.parametrize("settings", [TWO_RANKS], indirect=True, ids=str)
def test_sampled_and_constrained_requests(pair, prompts):
    """Ranks that choose different tokens would also use different lengths, and wait for each other forever."""
    kinds = [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 0.8, "regex": "[a-z ]{20,40}", "ignore_eos": False},
        {"presence_penalty": 0.5},
        {"temperature": 1.0, "return_logprob": True},
    ]
    requests = [
        {"input_ids": prompts[i % 60], "max_new_tokens": 40, "ignore_eos": True} | kinds[i % len(kinds)]
        for i in range(40)
    ]

    answers = pair.dflash.generate_concurrently(requests)

    assert all(len(answer["output_ids"]) == 40 for i, answer in enumerate(answers) if i % len(kinds) != 2)
    assert all(re.fullmatch("[a-z ]{0,40}", answer["text"]) for answer in answers[2 :: len(kinds)])


def test_ranks_draw_alike(keeper, prompts):
    """Keys, positions and drawn tokens are equal in every cycle and prefill, of requests with seeds and without."""
    server = keeper.server(DRAWING_TWO_RANKS, dflash=True)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "sampling_seed": 7}, {}]
    requests = [{"input_ids": prompts[i]} | options | kinds[i % len(kinds)] for i in range(12)]

    answers = server.generate_concurrently(requests)
    server.wait_until_empty()

    assert all(len(answer["output_ids"]) == 40 for answer in answers)
    draws = [re.findall(rf"Rank {rank} draws (.*)\.", server.log()) for rank in range(2)]
    assert len(draws[0]) > 20
    assert draws[0] == draws[1]


def test_logits_of_greedy_requests_are_not_gathered(keeper, prompts):
    server = keeper.server(LOGGED_TWO_RANKS, dflash=True)
    request = {"max_new_tokens": 40, "ignore_eos": True}

    server.generate(prompts[:4], **request)
    greedy = server.log().count("verified rows are gathered")
    server.generate(prompts[:4], temperature=1.0, **request)
    sampled = server.log().count("verified rows are gathered")

    assert greedy == 0
    assert sampled > 0
    server.wait_until_empty()


@pytest.mark.parametrize("settings", [TWO_RANKS], indirect=True, ids=str)
def test_abort_in_mid_stream(pair, prompts):
    """Every rank drops the request in the same step, and the others of the batch go on."""
    victim = {"input_ids": prompts[1], "max_new_tokens": 1900, "ignore_eos": True, "rid": "victim"}
    others = [{"input_ids": prompt, "max_new_tokens": 120, "ignore_eos": True} for prompt in prompts[20:26]]
    expected = pair.plain.generate_concurrently(others)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(pair.dflash.generate_concurrently, others)
        chunks = []
        for chunk in pair.dflash.stream(**victim):
            chunks.append(chunk)
            if len(chunks) == 4:
                pair.dflash.post("/abort_request", {"rid": "victim"})
        answers = running.result()

    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert_same_answers(answers, expected)


@pytest.mark.parametrize("settings", [TWO_RANKS], indirect=True, ids=str)
@pytest.mark.parametrize(("kind", "state"), [("no pickle", "Nothing was loaded."), ("shape", "may have been loaded")])
def test_tensors_that_one_rank_cannot_load(pair, prompts, kind, state):
    """The update fails on both ranks. Otherwise they would continue with different caches."""
    name = "model.layers.0.self_attn.o_proj.weight"
    zeros = torch.zeros_like(load_file(TARGET_DIR / "model.safetensors")[name])
    payloads = [pickle.dumps([(name, zeros)]), b"x" if kind == "no pickle" else pickle.dumps([(name, zeros[1:])])]
    body = {"serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads]}

    pair.dflash.post("/begin_weight_update", {})
    refused = pair.dflash.try_post("/update_weights_from_tensor", body)
    pair.dflash.post("/end_weight_update", {})

    assert refused.status_code == 400
    assert refused.json()["message"].startswith("rank 1: ")
    assert state in refused.json()["message"]
    for body in ({"model_path": "/nowhere"}, {"model_path": str(TARGET_DIR), "load_format": "x"}):
        assert pair.dflash.try_post("/update_weights_from_disk", body).status_code == 400
    assert pair.dflash.post("/update_weights_from_disk", {"model_path": str(TARGET_DIR)})["success"]
    pair.lossless(lambda server: server.generate_concurrently([{"input_ids": prompt} for prompt in prompts[:8]]))


@pytest.mark.parametrize("settings", [SMALL_POOL_TWO_RANKS], indirect=True, ids=str)
def test_retraction(pair, prompts):
    requests = [{"input_ids": prompt[:40], "max_new_tokens": 150, "ignore_eos": True} for prompt in prompts[:10]]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("settings", [TWO_REPLICAS], indirect=True, ids=str)
def test_replicas(pair, prompts):
    """Each replica is a server of its own, and requests go to them in turn."""
    answers = pair.lossless(
        lambda server: server.generate_concurrently(
            [{"input_ids": prompt, "max_new_tokens": 40} for prompt in prompts[:24]]
        )
    )

    # Random requests differ, also those that are the first of their replica.
    drawn = pair.dflash.generate_concurrently([{"input_ids": prompts[0], "max_new_tokens": 40, "temperature": 1.0}] * 8)
    assert len({tuple(answer["output_ids"]) for answer in drawn}) == 8
    states = pair.dflash.get("/server_info")["internal_states"]
    assert [state["sglang_dflash"]["worker"] for state in states] == ["DFlashWorker"] * 2
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
