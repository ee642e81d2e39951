"""DFLASH's answers equal those without speculation, under every layout of KV slots and of steps."""

import re

import pytest
from oracle import assert_same_cycles
from serving import DEFAULT, PAGED, SYNC, TREES_PAGED, Settings, trees

LAYOUTS = [
    DEFAULT,
    Settings("trees", dflash_flags=trees(8)),
    PAGED,
    TREES_PAGED,
    Settings(
        "page64-sync-block8",
        flags=(("page-size", 64), SYNC),
        dflash_flags=(("speculative-dflash-block-size", 8),),
        plain=DEFAULT,
    ),
    # Paths that end at the drafter's last position.
    Settings(
        "page64-sync-trees8",
        flags=(("page-size", 64), SYNC),
        dflash_flags=(*trees(3, 8), ("speculative-dflash-block-size", 4)),
        plain=DEFAULT,
    ),
    Settings(
        "chunk64-sync-block2",
        flags=(("chunked-prefill-size", 64), SYNC),
        dflash_flags=(("speculative-dflash-block-size", 2),),
        plain=DEFAULT,
    ),
]

pytestmark = pytest.mark.parametrize("settings", LAYOUTS, indirect=True, ids=str)


def test_one_request(pair, prompts):
    answer = pair.lossless(lambda server: server.generate(prompts[3], max_new_tokens=100, ignore_eos=True))

    assert len(answer["output_ids"]) == 100
    assert answer["meta_info"]["spec_verify_ct"] < 99, "no draft was ever accepted"
    assert "three launches per layer" not in pair.dflash.log()


def test_concurrent_requests_of_mixed_lengths(pair, mixed_prompts):
    requests = [
        {"input_ids": prompt, "max_new_tokens": 20 + 10 * (i % 7), "ignore_eos": i % 2 == 0}
        for i, prompt in enumerate(mixed_prompts)
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))


def test_many_prompts(pair, prompts):
    # Every second one in other layouts: requests end by the same code in all of them.
    some = prompts if pair.dflash.settings is DEFAULT else prompts[1::2]

    answers = pair.lossless(lambda server: server.generate(some, max_new_tokens=80))

    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length", "stop"}


def test_few_tokens(pair, prompts):
    """Requests end with their prefill, or near the end of their first block."""
    lengths = [1, 2, 16, 17, 18] * 6
    requests = [
        {"input_ids": prompt, "max_new_tokens": length, "ignore_eos": True} for prompt, length in zip(prompts, lengths)
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert [len(answer["output_ids"]) for answer in answers] == lengths


def test_cycles_are_the_oracles(pair, prompts, mixed_prompts, oracle):
    """Lossy context or a wrong mask would still give the right tokens, in more cycles."""
    some = [mixed_prompts[0], mixed_prompts[12], mixed_prompts[15], *prompts[:5]]

    for prompt, answer in zip(some, pair.dflash.generate(some, max_new_tokens=64)):
        assert_same_cycles(answer, oracle.generate(prompt, 64, **pair.dflash.settings.cycles))


def test_long_prompts_are_prefilled_in_chunks(pair, mixed_prompts):
    chunk = dict(pair.dflash.settings.flags).get("chunked-prefill-size", 2048)

    pair.dflash.generate(mixed_prompts[-1], max_new_tokens=2)

    prefilled = [int(num_tokens) for num_tokens in re.findall(r"#new-token: (\d+)", pair.dflash.log())]
    assert min(chunk, len(mixed_prompts[-1])) <= max(prefilled) <= chunk
