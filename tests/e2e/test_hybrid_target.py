"""Targets with Gated DeltaNet layers: states contain exactly the accepted tokens, in requests and in the prefix cache.

Drafts are the target's own text with errors (`tests/plugins/known_text.py`), so blocks are accepted to every length.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from serving import SYNC, Settings, with_plugin
from support import hybrid

ON_CPU = not torch.cuda.is_available()
# Tokens between two states of a decoding request that the prefix cache keeps.
INTERVAL = 64
CHUNKS = ("chunked-prefill-size", 64)


def trees(num_nodes: int) -> tuple:
    return ("speculative-eagle-topk", 8), ("speculative-num-draft-tokens", num_nodes)


# Name, target, flags of every server, and of the server with DFLASH.
LAYOUTS = [
    # Some batches are replayed with padding, and larger ones are not replayed.
    (
        "graphs",
        "Qwen3_5ForCausalLM",
        (CHUNKS, ("cuda-graph-max-bs-decode", 4), ("cuda-graph-bs-decode", (1, 2, 4))),
        (("mamba-track-interval", INTERVAL),),
    ),
    (
        "page64-sync",
        "Qwen3NextForCausalLM",
        (("page-size", 64), SYNC, ("mamba-track-interval", INTERVAL)),
        (("speculative-dflash-block-size", 5),),
    ),
    (
        "no-buffer",
        "Qwen3_5MoeForConditionalGeneration",
        (CHUNKS, ("mamba-radix-cache-strategy", "no_buffer"), SYNC),
        (("speculative-adaptive", True),),
    ),
    (
        "trees-graphs",
        "Qwen3_5ForConditionalGeneration",
        (CHUNKS, ("cuda-graph-max-bs-decode", 4), ("cuda-graph-bs-decode", (1, 2, 4))),
        (("mamba-track-interval", INTERVAL), *trees(24)),
    ),
    (
        "trees-page64",
        "Qwen3NextForCausalLM",
        (("page-size", 64), ("mamba-track-interval", INTERVAL)),
        trees(16),
    ),
    (
        "trees-no-buffer",
        "Qwen3_5ForCausalLM",
        (CHUNKS, ("mamba-radix-cache-strategy", "no_buffer"), SYNC),
        (("speculative-adaptive", True), *trees(32)),
    ),
]
LENGTH = 200
# More than all requests of a test leave in the cache.
SLOTS = 400
# "Q", which is part of no other token.
LETTER = 50


class KnownTexts:
    """Content of the plugin's file, and the target's own text: the greedy text of transformers."""

    def __init__(self, folder: Path, architecture: str, path: Path) -> None:
        self.path, self._texts = path, []
        self.target = hybrid.write_target(folder / "target", architecture)
        self.drafter = hybrid.write_drafter(folder / "drafter")
        self.model = hybrid.load_reference(self.target, architecture)
        self.tell()

    def tell(self, fault: str | None = None, record: Path | None = None) -> None:
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({"texts": self._texts, "fault": fault, "record": record and str(record)}))
        os.replace(written, self.path)

    def know(self, text: list[int]) -> None:
        self._texts.append(text)
        self.tell()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda param: param[0])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """Return the environment of all these servers, of which one is used at a time."""
    return (
        ("KNOWN_TEXT", str(tmp_path_factory.mktemp("known") / "texts.json")),
        ("SGLANG_MAMBA_CONV_DTYPE", "float32"),
        # Requests lose their states now and then, and are prefilled again.
        ("SGLANG_TEST_RETRACT", "1"),
        ("SGLANG_TEST_RETRACT_INTERVAL", "40"),
    )


@pytest.fixture(scope="module")
def known(layout, env, tmp_path_factory):
    return KnownTexts(tmp_path_factory.mktemp("hybrid"), layout[1], Path(dict(env)["KNOWN_TEXT"]))


@pytest.fixture(scope="module")
def texts(known):
    """Return by a prompt's length the prompt with LENGTH tokens of the target's own text, all known to the plugin."""
    lengths = (1, 63, 64, 65, 129, 301)
    texts = hybrid.greedy(known.model, [hybrid.prompt_of(1, length) for length in lengths], max(lengths) + LENGTH)
    texts = {length: text[: length + LENGTH] for length, text in zip(lengths, texts)}
    for text in texts.values():
        known.know(text)
    return texts


@pytest.fixture(scope="module")
def server(layout, keeper, known, env):
    name, _, flags, dflash_flags = layout
    plugins = ["known_text", *(["eager_graphs"] if name.endswith("graphs") and ON_CPU else [])]
    settings = Settings(
        f"hybrid-{name}",
        flags=(*flags, ("model-path", str(known.target)), ("max-mamba-cache-size", SLOTS)),
        dflash_flags=(*dflash_flags, ("speculative-draft-model-path", str(known.drafter))),
        env=(*with_plugin(*plugins), *env),
    )
    return keeper.server(settings, dflash=True)


@pytest.fixture(autouse=True)
def empty(request):
    """Check that a test leaves no request, slot or state in use."""
    server = request.getfixturevalue("server")
    server.flush_cache()
    yield
    server.flush_cache()
    server.wait_until_empty()


def keeps_states(server):
    """Return whether requests keep states at multiples of INTERVAL, and not only at their end."""
    return "no_buffer" not in dict(server.settings.flags).values()


def ask(text, prompt_length, length, **options):
    return {"input_ids": text[:prompt_length], "max_new_tokens": length, "ignore_eos": True} | options


def assert_text(answer, text, prompt_length):
    tokens = answer["output_ids"]
    expected = text[prompt_length : prompt_length + len(tokens)]
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
    assert tokens == expected, f"differs from token {same}, with {answer['meta_info']['cached_tokens']} cached"


def assert_greedy(known, prompt, answer):
    found = hybrid.first_difference(known.model, prompt, answer["output_ids"])
    assert found is None, f"differs from token {found}, with {answer['meta_info']['cached_tokens']} cached"


def test_concurrent_requests(server, texts):
    described = server.internal_state()["sglang_dflash"]["recurrent_states"]
    assert described["slots"] == SLOTS and described["running_requests"] == 16
    # Less than the states of all verified tokens.
    num_rows = server.settings.num_rows
    assert described["verify_bytes_per_request"] < 0.2 * num_rows * described["bytes_per_slot"]

    answers = server.generate_concurrently(
        [ask(text, length, LENGTH - 7 * i) for i, (length, text) in enumerate(texts.items())]
    )

    for (length, text), answer in zip(texts.items(), answers):
        assert len(answer["output_ids"]) > LENGTH - 50
        assert_text(answer, text, length)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    assert cycles < 0.6 * tokens, "hardly a draft was accepted"


def test_states_after_every_cycle(server, texts, known, tmp_path):
    """They equal those of a prefill of the same tokens, in every layer."""
    known.tell(record=tmp_path)
    server.generate_concurrently([ask(text, length, 40) for length, text in texts.items()])
    known.tell()

    accept_lens = set()
    for path in tmp_path.iterdir():
        cycle = torch.load(path)
        accept_lens.update(cycle["accept_lens"])
        for i, (prompt_length, length) in enumerate(zip(cycle["prompts"], cycle["lens"])):
            conv, temporal = hybrid.states_after(known.model, texts[prompt_length][:length])
            torch.testing.assert_close(cycle["conv"][:, i], conv, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(cycle["temporal"][:, i], temporal, rtol=1e-4, atol=1e-4)
    # Fewer with `--speculative-adaptive`, which verifies as few tokens as suits a CPU.
    is_adaptive = "speculative-adaptive" in dict(server.settings.dflash_flags)
    assert {1, 4 if is_adaptive else server.settings.block_size} <= accept_lens


def continued(server, texts, known, lengths, fault):
    """Ask for texts of 170 tokens, then continue them from several cuts.

    The cuts are the end, a token earlier, a block earlier, and inside the prompt.

    Returns:
        right: whether the tokens of each answer are right.
        found: for each continuation the prompt's length, the cut, and the number of cached tokens.
    """
    written = 170
    known.tell(fault)
    answers = server.generate_concurrently([ask(texts[length], length, written) for length in lengths])
    known.tell()
    right = [answer["output_ids"] == texts[length][length:][:written] for length, answer in zip(lengths, answers)]

    cuts = [(length, length + written - back) for length in lengths for back in (0, 1, 16, 110)]
    cuts += [(length, cut) for length in lengths for cut in (length - 1, 64)]
    answers = server.generate_concurrently([ask(texts[length], cut, 25) for length, cut in cuts])
    right += [answer["output_ids"] == texts[length][cut : cut + 25] for (length, cut), answer in zip(cuts, answers)]
    return right, [(*cut, answer["meta_info"]["cached_tokens"]) for cut, answer in zip(cuts, answers)]


def test_continued_texts(server, texts, known):
    right, found = continued(server, texts, known, (65, 129, 301), fault=None)

    assert all(right), right
    # The text after these prompts crosses several boundaries.
    later = [(length, cached) for length, cut, cached in found if cut > length + 150]
    if not keeps_states(server):
        assert all(cached >= length for length, cached in later), found
        return
    assert all(cached > length for length, cached in later), found
    # A request that was retracted after the last boundary has states at the ends of its prefill's chunks. Those are no
    # multiples if another prompt shared a chunk.
    assert any(cached % INTERVAL == 0 for _, cached in later), found


@pytest.mark.cpu(reason="a CUDA graph has been recorded with nothing left out")
def test_what_is_left_out_shows(server, texts, known):
    """The tests here notice states that are never advanced, never kept, or advanced by other nodes."""
    if server.settings.num_nodes is not None:
        # The nodes of a chain in place of those of the accepted path; chains show the rest.
        faults = ("paths",)
    else:
        faults = ("commit", "track") if keeps_states(server) else ("commit",)
    for fault in faults:
        right, _ = continued(server, texts, known, (129,), fault)
        assert not all(right), fault
        server.flush_cache()


def test_wrong_drafts_poison_nothing(server, texts, known):
    """Requests have other texts with wrong drafts only, and share one cached prefix."""
    text = texts[129]
    server.generate(**ask(text, 129, 100))
    others = [text[:129] + hybrid.prompt_of(1 + i % 5, 77 * i) for i in range(20)]

    answers = server.generate_concurrently([ask(prompt, len(prompt), 10) for prompt in others])

    assert all(answer["meta_info"]["cached_tokens"] >= 64 for answer in answers)
    for prompt, answer in zip(others, answers):
        assert_greedy(known, prompt, answer)
    for prompt_length in (129, 200, 229):
        again = server.generate(**ask(text, prompt_length, 90 if prompt_length == 129 else 25))
        assert again["meta_info"]["cached_tokens"] > 0
        assert_text(again, text, prompt_length)


def test_requests_that_end_inside_a_block(server, texts):
    """Requests end by a stop token, a length limit or a stop string, and are continued from what was returned."""
    text, start = texts[65], 65
    whole = server.generate(**ask(text, start, 120))
    ends = range(40, 40 + server.settings.block_size)
    requests = [ask(text, start, end) for end in ends]
    requests += [ask(text, start, 150, stop_token_ids=[text[start + end]], ignore_eos=False) for end in ends]
    # Stop strings at any place in a block.
    said = whole["text"]
    requests += [ask(text, start, 150, stop=said[at : at + 5]) for at in range(len(said) // 2, len(said) // 2 + 20, 4)]

    answers = server.generate_concurrently(requests)

    lengths = []
    for request, answer in zip(requests, answers):
        assert_text(answer, text, start)
        lengths.append(len(answer["output_ids"]))
        if "stop_token_ids" in request:
            assert lengths[-1] == text[start:].index(request["stop_token_ids"][0]) + 1
        if "stop" in request:
            assert answer["meta_info"]["finish_reason"]["matched"] == request["stop"]
    ends = [start + length for length in sorted(set(lengths))]
    for end, answer in zip(ends, server.generate_concurrently([ask(text, end, 30) for end in ends])):
        assert_text(answer, text, end)


def test_answers_that_end_inside_a_block_are_cached(server, texts):
    """Where the state of an answer's end is kept, the next turn finds it, wherever in a block the answer ends."""
    if keeps_states(server):
        pytest.skip("states are kept at multiples of an interval")
    text, start = texts[65], 65
    ends = range(40, 40 + server.settings.block_size)
    found = []
    for i, end in enumerate(ends):
        stop = {"stop_token_ids": [text[start + end - 1]], "ignore_eos": False}
        answer = server.generate(**ask(text, start, end) | (stop if i % 2 else {}))
        written = start + len(answer["output_ids"])
        assert_text(answer, text, start)
        again = server.generate(**ask(text, written + 1, 20))
        assert_text(again, text, written + 1)
        # The last token has no KV if no verified block had it.
        found.append(again["meta_info"]["cached_tokens"] - written)
        server.flush_cache()
    assert set(found) <= {-1, 0}, found


def test_grammars_that_end_inside_a_block(server, known):
    """Tokens that were accepted after the end, past a boundary, are in no state that is found again."""
    requests, texts = [], []
    # They end with the end of text, 1 to 5 tokens before a boundary. The last boundary is also inside the answers.
    for num_letters in range(86, 91):
        prompt = hybrid.prompt_of(100, 500 + num_letters)
        written = prompt + [LETTER] * num_letters + [hybrid.TEXT["eos_token_id"]]
        (text,) = hybrid.greedy(known.model, [written], 24)
        known.know(text)
        texts.append(text)
        requests.append({"input_ids": prompt, "regex": f"Q{{{num_letters}}}", "max_new_tokens": 120})

    answers = server.generate_concurrently(requests)

    continued = []
    for text, request, answer in zip(texts, requests, answers):
        written = request["input_ids"] + answer["output_ids"]
        assert written == text[:-24]
        assert answer["meta_info"]["spec_verify_ct"] < 60
        continued += [ask(text, cut, 20) for cut in (len(written), len(written) + 3, len(written) - 1)]
    for request, answer in zip(continued, server.generate_concurrently(continued)):
        assert_greedy(known, request["input_ids"], answer)


def test_every_kind_of_request_in_one_batch(server, texts, known):
    """SGLang's sampler chooses tokens for requests whose blocks the fast path has already accepted."""
    kinds = [
        {},
        {"return_logprob": True},
        {"frequency_penalty": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "sampling_seed": 7},
        {"regex": ".*"},
    ]
    requests = [ask(texts[length], length, 40, **kind) for length in (63, 64, 129) for kind in kinds]

    answers = server.generate_concurrently(requests)

    for request, answer in zip(requests, answers):
        length = len(request["input_ids"])
        assert len(answer["output_ids"]) == 40 or "regex" in request
        if "sampling_seed" not in request and "regex" not in request:
            assert_text(answer, texts[length], length)
    # Continuations of everything that these requests left in the cache.
    prompts = [(request["input_ids"] + answer["output_ids"])[:-10] for request, answer in zip(requests, answers)]
    again = server.generate_concurrently([ask(prompt, len(prompt), 20) for prompt in prompts])
    for prompt, answer in zip(prompts, again):
        assert_greedy(known, prompt, answer)


def test_no_slot_leaks(server, texts):
    """A third of 90 requests of mixed lengths is aborted. SGLang counts its slots whenever it is idle."""
    choose = random.Random(0)

    def run(i):
        length, text = choose.choice(list(texts.items()))
        start = length + choose.randrange(40)
        request = ask(text, start, choose.randrange(1, 25))
        if i % 3:
            assert_text(server.generate(**request), text, start)
            return
        chunks = server.stream(**request)
        for _ in range(choose.randrange(1, 4)):
            next(chunks, None)
        chunks.close()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(90)))

    assert server.is_running()
    assert "Testing retraction. " in server.log()


def test_images_are_refused(server):
    refused = server.try_post("/generate", {"text": "What is this?", "image_data": "data:image/png;base64,AAAA"})

    assert refused.status_code == 400 and "recurrent layers" in refused.text
