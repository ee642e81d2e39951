"""A radix hit reuses the target's KV and the drafter's context, which are in the same slots."""

import pytest
from oracle import assert_same_cycles
from serving import DEFAULT, PAGED, TREES_PAGED

pytestmark = pytest.mark.parametrize("settings", [DEFAULT, PAGED, TREES_PAGED], indirect=True, ids=str)


def page_floor(num_tokens, settings):
    page_size = dict(settings.flags).get("page-size", 1)
    return num_tokens // page_size * page_size


# 64 is a multiple of pages and chunks. The others end inside a page, 3 and 8 inside the first one.
@pytest.mark.parametrize("shared", [3, 8, 50, 64, 100, 151])
def test_second_request_reuses_a_shared_prefix(pair, prompts, oracle, shared):
    first, other = sum(prompts[20:24], []), sum(prompts[30:34], [])
    assert first[shared] != other[shared]
    second = first[:shared] + other[shared : shared + 60]

    def both(server):
        return [server.generate(prompt, max_new_tokens=64, ignore_eos=True) for prompt in (first[:200], second)]

    dflash, plain = pair.ask(both)

    cached = [answer["meta_info"]["cached_tokens"] for answer in dflash]
    assert cached == [0, page_floor(shared, pair.dflash.settings)]
    for prompt, answer in zip((first[:200], second), dflash):
        assert_same_cycles(answer, oracle.generate(prompt, 64, ignore_eos=True, **pair.dflash.settings.cycles))
    assert dflash[1]["output_ids"] == plain[1]["output_ids"]


def test_hit_drafts_as_a_cold_cache_does(pair, prompts):
    """The same prompt is sent again, and all of it but the last token, or page, comes from the cache."""
    prompt = sum(prompts[10:13], [])

    cold, hit = pair.lossless(lambda server: [server.generate(prompt, max_new_tokens=100) for _ in range(2)])

    assert cold["meta_info"]["cached_tokens"] == 0
    assert hit["meta_info"]["cached_tokens"] == page_floor(len(prompt) - 1, pair.dflash.settings)
    assert hit["output_ids"] == cold["output_ids"]
    for counter in ("spec_verify_ct", "spec_correct_drafts_histogram"):
        assert hit["meta_info"][counter] == cold["meta_info"][counter]


def test_next_turn_reuses_the_generated_tokens(pair, prompts, oracle):
    """The second prompt is the first one, its answer and more; both were appended to the context."""
    question, follow_up = prompts[4], prompts[5][:20]

    def converse(server):
        first = server.generate(question, max_new_tokens=50, ignore_eos=True)
        prompt = question + first["output_ids"] + follow_up
        return [first, server.generate(prompt, max_new_tokens=64, ignore_eos=True)]

    dflash, plain = pair.ask(converse)

    # The KV of an answer's last token depends on the length of its last step.
    length = len(question) + 50
    allowed = {page_floor(length - 1, pair.dflash.settings), page_floor(length, pair.dflash.settings)}
    assert dflash[1]["meta_info"]["cached_tokens"] in allowed
    prompt = question + dflash[0]["output_ids"] + follow_up
    assert_same_cycles(dflash[1], oracle.generate(prompt, 64, ignore_eos=True, **pair.dflash.settings.cycles))
    assert dflash[1]["output_ids"] == plain[1]["output_ids"]


def test_many_requests_share_a_prefix(pair, prompts):
    """The radix tree gets hits, inserts and splits while other requests run."""
    shared = sum(prompts[40:42], [])[:90]
    requests = [
        {"input_ids": shared[: 90 - 7 * (i % 5)] + prompts[i], "max_new_tokens": 40, "ignore_eos": True}
        for i in range(16)
    ]

    for _ in range(2):
        answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert all(answer["meta_info"]["cached_tokens"] > 60 for answer in answers)
