"""Every cycle of the server accepts as many tokens as the batch-1 algorithm on Hugging Face's target."""

import pytest
from oracle import answer_lengths, assert_same_cycles
from serving import DEFAULT

pytestmark = pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)

MAX_NEW_TOKENS = 96
PATIENCE = 5


def stream_until_whole(server, prompt):
    """Return the chunks of a streamed answer, one per step. If a busy HTTP process merges chunks, ask once more."""
    for _ in range(PATIENCE):
        server.flush_cache()
        chunks = list(server.stream(prompt, max_new_tokens=MAX_NEW_TOKENS))
        if len(chunks) == 1 + chunks[-1]["meta_info"].get("spec_verify_ct", 0):
            return chunks
    pytest.fail(f"{PATIENCE} streams of {len(prompt)} tokens all had merged chunks")


@pytest.mark.parametrize("index", range(0, 60, 4))
def test_every_cycle_of_a_single_request(pair, prompts, oracle, index):
    output = oracle.generate(prompts[index], MAX_NEW_TOKENS)

    chunks = stream_until_whole(pair.dflash, prompts[index])

    assert [len(chunk["output_ids"]) for chunk in chunks] == answer_lengths(output)
    assert_same_cycles(chunks[-1], output)


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_cycles_of_a_batch(pair, prompts, oracle, start):
    """SGLang's sampler chooses the tokens of requests for log probabilities. Their drafts are the same."""
    batch = prompts[start : start + 8]

    answers = pair.dflash.generate_concurrently(
        [
            {"input_ids": prompt, "max_new_tokens": MAX_NEW_TOKENS, "return_logprob": i % 2 == 1}
            for i, prompt in enumerate(batch)
        ]
    )

    for prompt, answer in zip(batch, answers, strict=True):
        assert_same_cycles(answer, oracle.generate(prompt, MAX_NEW_TOKENS))
