"""A request that ends inside a block ends where it would end without speculation."""

import re

import pytest
from oracle import EOS, answer_lengths
from serving import DEFAULT, PAGED

CONTEXT_LENGTH = 2048
# (prompt, tokens to leave out at its end): the answer soon ends with EOS, mostly in a cycle that accepted more tokens.
# Found by trying; another pair ends elsewhere.
ENDS_EARLY = [(57, 1), (43, 4), (57, 4), (43, 7), (26, 10), (23, 13), (26, 31), (21, 0)]

pytestmark = pytest.mark.parametrize("settings", [DEFAULT, PAGED], indirect=True, ids=str)


@pytest.fixture(scope="module")
def inner_tokens(prompts, oracle):
    """Return (prompt, answer, i): token i is new in the answer, and neither the first nor the last of its cycle."""
    found = []
    for prompt in prompts[::4]:
        output = oracle.generate(prompt, 96)
        ends = {length - 1 for length in answer_lengths(output)}
        starts = {end + 1 for end in ends}
        tokens = output.tokens
        inner = [i for i in range(6, len(tokens)) if tokens[i] not in tokens[:i] and i not in ends | starts]
        if inner:
            found.append((prompt, tokens, inner[0]))
    assert len(found) >= 8
    return found


def test_eos_inside_a_block(pair, prompts, oracle):
    some = [prompts[i][: len(prompts[i]) - left_out] for i, left_out in ENDS_EARLY]

    answers = pair.lossless(lambda server: server.generate(some, max_new_tokens=96))

    num_cut = 0
    for prompt, answer in zip(some, answers):
        output = oracle.generate(prompt, 96)
        assert answer["output_ids"] == output.tokens
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
        num_cut += 1 + sum(output.accept_lengths) > len(output.tokens)
    assert num_cut >= 5, "too few answers ended before the end of what their last cycle accepted"


def test_stop_token_inside_a_block(pair, inner_tokens):
    requests = [
        {"input_ids": prompt, "max_new_tokens": 96, "stop_token_ids": [tokens[i]]} for prompt, tokens, i in inner_tokens
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    for (_, tokens, i), answer in zip(inner_tokens, answers):
        assert answer["output_ids"] == tokens[: i + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[i]}


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_stop_string_inside_a_block(pair, inner_tokens, tokenizer, no_stop_trim):
    requests, stops = [], []
    for prompt, tokens, i in inner_tokens:
        # A text of two tokens, so that the match begins in one token and ends in the next.
        stop = tokenizer.decode(tokens[i - 1 : i + 1])
        if stop in tokenizer.decode(tokens[:i]):
            continue
        stops.append(stop)
        requests.append(
            {"input_ids": prompt, "max_new_tokens": 96, "stop": [stop, "never seen"], "no_stop_trim": no_stop_trim}
        )
    assert len(requests) >= 5

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    for stop, answer in zip(stops, answers):
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert (stop in answer["text"]) == no_stop_trim


def test_first_of_several_ends(pair, inner_tokens, tokenizer):
    """A request meets two of its ends in one cycle, and the one that SGLang checks first comes last."""
    requests, lengths = [], []
    for prompt, tokens, i in inner_tokens:
        here, next_ = (tokenizer.decode([token]) for token in tokens[i : i + 2])
        if not (here and next_) or next_ in tokenizer.decode(tokens[: i + 1]) or here in tokenizer.decode(tokens[:i]):
            continue
        for ends in (
            {"stop_token_ids": [tokens[i]], "stop": [next_]},
            {"stop_token_ids": [tokens[i]], "stop_regex": [re.escape(next_)]},
            {"stop": [next_, here]},
            {"stop": [next_], "stop_regex": [re.escape(here)]},
            # A pattern that is not left to `re`.
            {"stop": [next_], "stop_regex": [f"(x+)+y|{re.escape(here)}"]},
        ):
            requests.append({"input_ids": prompt, "max_new_tokens": 96, **ends})
            lengths.append(i + 1)
        requests.append({"input_ids": prompt, "max_new_tokens": i + 1, "stop": [next_]})
        lengths.append(i + 1)
    assert len(requests) >= 3 * 6

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert [len(answer["output_ids"]) for answer in answers] == lengths


def test_context_limit(pair, prompts, mixed_prompts):
    """Requests fill the context while others continue, which must not notice."""
    text = sum(prompts, [])
    long_prompts = [
        text[start : start + CONTEXT_LENGTH - room] for start, room in ((0, 40), (500, 33), (900, 17), (1300, 7))
    ]
    long_requests = [
        {"input_ids": prompt, "max_new_tokens": CONTEXT_LENGTH - len(prompt), "ignore_eos": True}
        for prompt in long_prompts
    ]
    neighbours = [{"input_ids": prompt, "max_new_tokens": 120, "ignore_eos": True} for prompt in mixed_prompts[:5]]
    requests = [request for both in zip(neighbours, long_requests) for request in both] + neighbours[4:]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    for request, answer in zip(requests, answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        room = CONTEXT_LENGTH - len(request["input_ids"])
        assert len(answer["output_ids"]) >= min(request["max_new_tokens"], room - 2)


def test_several_answers_of_a_least_length(pair, prompts):
    """SGLang prefills their prompt first, by a request of no tokens with the same least length."""
    options = {"n": 2, "min_new_tokens": 12, "max_new_tokens": 20}
    answers = pair.lossless(lambda server: server.generate(prompts[1], **options))

    assert [len(answer["output_ids"]) for answer in answers] == [20, 20]
