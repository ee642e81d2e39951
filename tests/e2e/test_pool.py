"""KV slots under pressure: retraction, aborts, many requests. The `pair` fixture checks that no slot leaks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import DEFAULT, PLAIN_SYNC, RETRACT, SMALL_POOL, SYNC, Settings, assert_same_answers, trees

SMALL_POOLS = [
    # The reference must keep its penalties; SGLang's own forget the tokens generated before a retraction.
    Settings("small-pool", flags=SMALL_POOL, env=RETRACT, plain=PLAIN_SYNC),
    Settings("small-pool-page16-sync", flags=(*SMALL_POOL, ("page-size", 16), SYNC), env=RETRACT, plain=PLAIN_SYNC),
    # Requests hold slots for more nodes than a path has.
    Settings(
        "small-pool-trees",
        flags=SMALL_POOL,
        dflash_flags=(*trees(4, 10), ("speculative-dflash-block-size", 5)),
        env=RETRACT,
        plain=PLAIN_SYNC,
    ),
]


@pytest.mark.parametrize("settings", SMALL_POOLS, indirect=True, ids=str)
def test_retraction(pair, prompts):
    requests = [{"input_ids": prompt[:40], "max_new_tokens": 230, "ignore_eos": True} for prompt in prompts[:10]]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("settings", SMALL_POOLS[:1], indirect=True, ids=str)
def test_penalties_survive_retraction(pair, prompts):
    requests = [
        {"input_ids": prompt[:40], "max_new_tokens": 120, "ignore_eos": True} | penalty
        for prompt, penalty in zip(
            prompts, [{"frequency_penalty": 0.4}, {"repetition_penalty": 1.3}, {"min_new_tokens": 100}, {}] * 3
        )
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("settings", SMALL_POOLS, indirect=True, ids=str)
def test_a_request_that_fills_the_pool(pair, prompts):
    """The request ends as soon as its next two blocks might not fit, and it ends properly."""
    size = dict(pair.dflash.settings.flags)["max-total-tokens"]
    page_size = dict(pair.dflash.settings.flags).get("page-size", 1)
    prompt = sum(prompts, [])[: size - 150]

    dflash, plain = pair.ask(lambda server: server.generate(prompt, max_new_tokens=150, ignore_eos=True))

    length = len(dflash["output_ids"])
    assert dflash["meta_info"]["finish_reason"] == {"type": "length", "length": length}
    assert dflash["output_ids"] == plain["output_ids"][:length]
    assert length >= 150 - 2 * pair.dflash.settings.num_rows - page_size


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_200_requests(pair, prompts):
    requests = [
        {"input_ids": prompts[i % 60][: 5 + i // 3], "max_new_tokens": 1 + i % 37, "ignore_eos": i % 3 > 0}
        for i in range(200)
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_parallel_samples(pair, prompts):
    answers = pair.lossless(lambda server: server.generate(prompts[7], max_new_tokens=48, n=4))

    alone = pair.plain.generate(prompts[7], max_new_tokens=48)
    assert len(answers) == 4
    for answer in answers:
        assert_same_answers(answer, alone)


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
@pytest.mark.parametrize("how", ["disconnect", "abort_request"])
def test_abort_in_mid_stream(pair, prompts, how):
    """Other requests of the batch go on as if the aborted request had never been there."""
    victim = {"input_ids": prompts[1], "max_new_tokens": 1900, "ignore_eos": True}
    others = [{"input_ids": prompt, "max_new_tokens": 300, "ignore_eos": True} for prompt in prompts[20:26]]
    quiet = pair.plain.generate_concurrently([victim | {"max_new_tokens": 300}, *others])

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(pair.dflash.generate_concurrently, others)
        chunks = []
        stream = pair.dflash.stream(**victim, rid=f"victim of {how}")
        for chunk in stream:
            chunks.append(chunk)
            if len(chunk["output_ids"]) > 40:
                break
        assert not running.done()
        if how == "disconnect":
            stream.close()
        else:
            pair.dflash.post("/abort_request", {"rid": "victim of abort_request"})
            chunks += list(stream)
            assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        answers = running.result()

    assert_same_answers(answers, quiet[1:])
    seen = chunks[-1]["output_ids"] or chunks[-2]["output_ids"]
    assert 40 < len(seen) < 300
    assert seen == quiet[0]["output_ids"][: len(seen)]
    pair.dflash.wait_until_empty()
