"""LoRA adapters of the target: requests with different adapters and with none share batches, and each request's text is
the one of the same server without speculation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import SYNC, Settings, assert_same_answers, generate_body, trees
from support.adapters import ATTENTION, LAYERS, VOCABULARY, adapter

from models.tiny import DRAFTER_DIR, TARGET_DIR

ADAPTERS = ("red", "green", "blue")


def lora(modules: dict[str, tuple[str, ...]], max_loras: int, *others: tuple) -> tuple:
    """Return the flags of a server with adapters of these layers.

    Args:
        max_loras: adapters in one batch. Requests without an adapter count as one.
    """
    return (
        ("lora-backend", "torch_native"),
        ("lora-paths", tuple(f"{name}={adapter(f'{name}-{len(names)}', names)}" for name, names in modules.items())),
        ("max-loras-per-batch", max_loras),
        *others,
    )


CHUNKED = Settings(
    "lora-chunks", flags=lora(dict(zip(ADAPTERS, (ATTENTION, LAYERS, LAYERS))), 4, ("chunked-prefill-size", 64))
)
# The third adapter of a batch waits until one of the others is evicted.
EVICTED = Settings(
    "lora-evicted-trees",
    flags=lora(dict.fromkeys(ADAPTERS, LAYERS), 2, ("page-size", 16)),
    dflash_flags=(SYNC, *trees(8)),
)
VOCABULARIES = Settings(
    "lora-vocabulary-trees",
    flags=lora({"red": (*ATTENTION, "embed_tokens"), "green": ("lm_head",), "blue": (*LAYERS, *VOCABULARY)}, 4),
    dflash_flags=trees(8),
)
BATCHES = pytest.mark.parametrize("settings", [CHUNKED, EVICTED], indirect=True, ids=str)
EVERY = pytest.mark.parametrize("settings", [CHUNKED, EVICTED, VOCABULARIES], indirect=True, ids=str)
pytestmark = pytest.mark.cpu(reason="a GPU has other kernels of adapters")


def requests_of(prompts: list, adapters: tuple, **options) -> list[dict]:
    options = {"max_new_tokens": 40, "ignore_eos": True} | options
    return [
        {"input_ids": prompt, "lora_path": adapters[i % len(adapters)]} | options for i, prompt in enumerate(prompts)
    ]


# SGLang's CPU backend applies adapters of the lm_head to the wrong rows when it prefills several prompts at a time.
@BATCHES
def test_adapters_and_none_in_one_batch(pair, prompts):
    long = sum(prompts[30:33], [])
    requests = requests_of([*prompts[:11], long], (None, *ADAPTERS))
    without = pair.plain.generate([request["input_ids"] for request in requests], max_new_tokens=40, ignore_eos=True)

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    changed = [answer["output_ids"] != other["output_ids"] for answer, other in zip(answers, without)]
    assert changed == [request["lora_path"] is not None for request in requests]
    unadapted = [answer["meta_info"]["spec_verify_ct"] for answer in answers[::4]]
    assert max(unadapted) < 39, "no drafts are accepted"
    # The prefix cache has the prompts of each adapter.
    again = pair.dflash.generate_concurrently(requests)
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in again)
    assert_same_answers(again, answers)


@EVERY
def test_one_prompt_with_every_adapter(pair, prompts):
    """Each adapter has its own KV of a prompt, of the target and of the drafter."""
    requests = requests_of([prompts[12]] * 4, (*ADAPTERS, None))
    pair.plain.flush_cache()

    answers = pair.lossless(lambda server: [server.generate(**request) for request in requests])

    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0] * 4


@BATCHES
def test_outputs_of_adapters(pair, prompts):
    """Log probabilities, several answers and sampled tokens are of the adapter's own distribution."""
    requests = [
        *requests_of(prompts[13:16], ADAPTERS, return_logprob=True, top_logprobs_num=2, logprob_start_len=0),
        # The second most probable token has no chance.
        *requests_of(prompts[13:16], ADAPTERS, temperature=1.0, top_p=1e-6),
        *requests_of(prompts[16:17], ADAPTERS, n=3),
    ]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests))

    assert_same_answers(dflash[:3], plain[:3])
    for mine, expected in zip(dflash[:3], plain[:3]):
        for field in ("input_token_logprobs", "output_token_logprobs"):
            values, others = ([entry[0] for entry in answer["meta_info"][field]] for answer in (mine, expected))
            assert values[0] is None or len(values) == len(others)
            assert values[-40:] == pytest.approx(others[-40:], abs=2e-4)
    assert_same_answers(dflash[3:6], plain[3:6])
    assert_same_answers(dflash[6], plain[6])


@BATCHES
def test_adapters_come_and_go_while_requests_run(pair, prompts):
    """An adapter serves as soon as it is loaded. A request for one that was unloaded loads it again."""
    modules = ATTENTION if pair.dflash.settings is CHUNKED else LAYERS
    running = requests_of(prompts[20:24], (None, "red"), max_new_tokens=120)
    violet = {"lora_path": "violet", "max_new_tokens": 40}

    def come_and_go(server):
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(server.generate_concurrently, running)
            path = adapter(f"violet-{len(modules)}", modules)
            loaded = server.post("/load_lora_adapter", {"lora_name": "violet", "lora_path": path})
            assert loaded["success"], loaded
            answer = server.post("/generate", generate_body(prompts[24], violet))
            assert server.post("/unload_lora_adapter", {"lora_name": "violet"})["success"]
            again = server.post("/generate", generate_body(prompts[24], violet))
            return [answer, again, *answers.result()]

    answers = pair.lossless(come_and_go)

    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    missing = generate_body(prompts[0], {"lora_path": "grey"})
    for path, body, message in (
        ("/load_lora_adapter", {"lora_name": "grey", "lora_path": "/nowhere"}, "nowhere"),
        ("/load_lora_adapter", {"lora_name": "red", "lora_path": "/nowhere"}, "red"),
        ("/unload_lora_adapter", {"lora_name": "grey"}, "grey"),
        ("/generate", missing, "grey"),
        ("/generate", missing | {"lora_path": 7}, "lora_path"),
    ):
        response = pair.dflash.try_post(path, body)
        assert response.status_code == 400, f"{path} {body}: {response.status_code} {response.text}"
        assert message in response.text
    pair.lossless(lambda server: server.generate(prompts[2], max_new_tokens=24, lora_path="green"))


@BATCHES
def test_weight_updates_leave_adapters_alone(pair, prompts):
    requests = requests_of(prompts[25:27], ("red", None), max_new_tokens=24)
    before = pair.lossless(lambda server: server.generate_concurrently(requests))
    for path in (TARGET_DIR, DRAFTER_DIR):
        assert pair.dflash.post("/update_weights_from_disk", {"model_path": str(path)})["success"]
        assert_same_answers(pair.dflash.generate_concurrently(requests), before)
