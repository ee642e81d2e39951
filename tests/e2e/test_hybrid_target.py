"""Targets with Gated DeltaNet layers: states hold exactly what has been accepted, in requests and in the prefix cache.

Drafts are the target's own text with errors (`known_text_plugin`), so that blocks are accepted to every length.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hybrid
import pytest
from serving import SYNC, Settings, with_plugin

pytestmark = pytest.mark.cpu(reason="these targets are served on a CPU only")

# Tokens between two states that the prefix cache keeps of a request that decodes.
INTERVAL = 64
CHUNKS = ("chunked-prefill-size", 64)
# Name, target, flags of every server, and of DFLASH's.
LAYOUTS = [
    ("overlap", "Qwen3_5ForCausalLM", (CHUNKS,), (("mamba-track-interval", INTERVAL), ("speculative-adaptive", True))),
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
        (),
    ),
]
LENGTH = 200
# "Q", which is in no other token.
LETTER = 50


class KnownTexts:
    """What the plugin knows, and the target's own text: transformers' greedy one."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.path, self._texts = folder / "texts.json", []
        self.target = hybrid.write_target(folder / "target", architecture)
        self.drafter = hybrid.write_drafter(folder / "drafter")
        self._model = hybrid.load_reference(self.target, architecture)
        self.tell()

    def tell(self, fault: str | None = None) -> None:
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({"texts": self._texts, "fault": fault}))
        os.replace(written, self.path)

    def know(self, text: list[int]) -> None:
        self._texts.append(text)
        self.tell()

    def after(self, prompt: list[int], length: int) -> list[int]:
        return hybrid.greedy(self._model, prompt, length)[len(prompt) :]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda param: param[0])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def known(layout, tmp_path_factory):
    return KnownTexts(tmp_path_factory.mktemp("hybrid"), layout[1])


@pytest.fixture(scope="module")
def texts(known):
    """By the prompt's length, a prompt and LENGTH tokens of the target's, all known to the drafter."""
    lengths = (1, 63, 64, 65, 129, 301)
    texts = {length: hybrid.prompt_of(length, length) for length in lengths}
    texts = {length: prompt + known.after(prompt, LENGTH) for length, prompt in texts.items()}
    for text in texts.values():
        known.know(text)
    return texts


@pytest.fixture(scope="module")
def server(layout, keeper, known):
    name, _, flags, dflash_flags = layout
    settings = Settings(
        f"hybrid-{name}",
        flags=(*flags, ("model-path", str(known.target)), ("max-mamba-cache-size", 100)),
        dflash_flags=(*dflash_flags, ("speculative-draft-model-path", str(known.drafter))),
        env=(
            *with_plugin("known_text"),
            ("KNOWN_TEXT", str(known.path)),
            ("SGLANG_MAMBA_CONV_DTYPE", "float32"),
            # Requests lose their states now and then, and are prefilled again.
            *((("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "40")) if name == "no-buffer" else ()),
        ),
    )
    return keeper.server(settings, dflash=True)


@pytest.fixture(autouse=True)
def empty(request):
    """No test leaves a request, a slot or a state behind."""
    server = request.getfixturevalue("server")
    server.flush_cache()
    yield
    server.flush_cache()
    server.wait_until_empty()


def keeps_states(server):
    """Whether requests leave states at multiples of INTERVAL, or at their end."""
    return "no_buffer" not in dict(server.settings.flags).values()


def ask(text, prompt_length, length, **options):
    return {"input_ids": text[:prompt_length], "max_new_tokens": length, "ignore_eos": True} | options


def assert_text(answer, text, prompt_length):
    tokens = answer["output_ids"]
    expected = text[prompt_length : prompt_length + len(tokens)]
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
    assert tokens == expected, f"differs from token {same}, with {answer['meta_info']['cached_tokens']} cached"


def test_concurrent_requests(server, texts):
    described = server.internal_state()["sglang_dflash"]["recurrent_states"]
    assert described["slots"] == 100
    # Of the states of 16 tokens.
    block_size = server.settings.block_size
    assert described["verify_bytes_per_request"] < 0.2 * block_size * described["bytes_per_slot"]

    answers = server.generate_concurrently(
        [ask(text, length, LENGTH - 7 * i) for i, (length, text) in enumerate(texts.items())]
    )

    for (length, text), answer in zip(texts.items(), answers):
        assert len(answer["output_ids"]) > LENGTH - 50
        assert_text(answer, text, length)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    assert cycles < 0.6 * tokens, "hardly a draft was accepted"


@pytest.mark.parametrize("fault", [None, "commit", "track"])
def test_continued_texts(server, texts, known, fault):
    """From all of a text, a token less, a block less, and from inside its prompt; it crosses several boundaries."""
    if fault == "track" and not keeps_states(server):
        pytest.skip("no states are kept while requests decode")
    lengths, right = (65, 129, 301), []
    known.tell(fault)
    server.generate_concurrently([ask(texts[length], length, 170) for length in lengths])
    known.tell()

    for length in lengths:
        text = texts[length]
        for prompt_length in (length + 170, length + 169, length + 154, length + 60, length - 1, 64):
            answer = server.generate(**ask(text, prompt_length, 25))
            # Inside the prompt the text is not the target's.
            inside = prompt_length < length
            expected = known.after(text[:prompt_length], 25) if inside else text[prompt_length : prompt_length + 25]
            right.append(answer["output_ids"][: len(expected)] == expected)
            cached = answer["meta_info"]["cached_tokens"]
            if fault is None and prompt_length > length + 150:
                assert cached > (length if keeps_states(server) else length - 1)
                if keeps_states(server):
                    assert cached % INTERVAL == 0

    # A fault would show.
    assert all(right) == (fault is None), right


def test_wrong_drafts_poison_nothing(server, texts, known):
    """Requests of other texts, whose drafts are all wrong, over one cached prefix."""
    text = texts[129]
    server.generate(**ask(text, 129, 100))
    others = [text[:129] + hybrid.prompt_of(1 + i % 5, 31 * i) for i in range(24)]

    answers = server.generate_concurrently(
        [{"input_ids": prompt, "max_new_tokens": 70, "ignore_eos": True} for prompt in others]
    )

    assert all(answer["meta_info"]["cached_tokens"] >= 64 for answer in answers)
    for prompt, answer in list(zip(others, answers))[:3]:
        assert answer["output_ids"] == known.after(prompt, 70)
    for prompt_length in (129, 200, 229):
        again = server.generate(**ask(text, prompt_length, 90 if prompt_length == 129 else 25))
        assert again["meta_info"]["cached_tokens"] > 0
        assert_text(again, text, prompt_length)


def test_requests_that_end_inside_a_block(server, texts):
    """By a stop token, a length limit or a stop string; continued from what was returned."""
    text = texts[65]
    for end in range(40, 60):
        stop = text[65 + end]
        answer = server.generate(text[:65], max_new_tokens=150, stop_token_ids=[stop], ignore_eos=True)
        length = text[65:].index(stop) + 1
        assert answer["output_ids"] == text[65 : 65 + length]
        answer = server.generate(**ask(text, 65 + length, 20))
        assert_text(answer, text, 65 + length)
        answer = server.generate(**ask(text, 65, end))
        assert_text(answer, text, 65)
        answer = server.generate(**ask(text, 65 + end, 70))
        assert_text(answer, text, 65 + end)


def test_grammars_that_end_inside_a_block(server, known):
    """The tokens that were accepted behind the end, over a boundary, are in no state that is found again."""
    for num_letters in range(86, 91):
        prompt = hybrid.prompt_of(100, 500 + num_letters)
        # It ends with the end of text, 1 to 5 tokens before a boundary; the last boundary is in the answer as well.
        written = prompt + [LETTER] * num_letters + [hybrid.TEXT["eos_token_id"]]
        text = written + known.after(written, 40)
        known.know(text)
        answer = server.generate(prompt, regex=f"Q{{{num_letters}}}", max_new_tokens=120)
        assert prompt + answer["output_ids"] == written
        assert answer["meta_info"]["spec_verify_ct"] < num_letters

        for length in (len(written), len(written) + 3):
            again = server.generate(**ask(text, length, 30))
            assert_text(again, text, length)
        again = server.generate(**ask(text, len(written) - 1, 30))
        assert again["output_ids"] == known.after(written[:-1], 30)


def test_every_kind_of_request_in_one_batch(server, texts):
    """Requests whose tokens SGLang's sampler chooses, after the plain rule has accepted others of the same blocks."""
    kinds = [
        {},
        {"return_logprob": True},
        {"frequency_penalty": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "sampling_seed": 7},
        {"regex": ".*"},
    ]
    requests = [ask(texts[length], length, 100, **kind) for length in (63, 64, 129) for kind in kinds]

    answers = server.generate_concurrently(requests)

    for request, answer in zip(requests, answers):
        length = len(request["input_ids"])
        assert len(answer["output_ids"]) == 100 or "regex" in request
        if "sampling_seed" not in request and "regex" not in request:
            assert_text(answer, texts[length], length)
    for length in (63, 64, 129):
        assert_text(server.generate(**ask(texts[length], length + 90, 60)), texts[length], length + 90)


def test_no_slot_leaks(server, texts):
    """200 requests of mixed lengths, of which a third is given up; SGLang counts its slots whenever it is idle."""
    choose = random.Random(0)

    def run(i):
        length, text = choose.choice(list(texts.items()))
        start = length + choose.randrange(40)
        request = ask(text, start, choose.randrange(1, 60))
        if i % 3:
            assert_text(server.generate(**request), text, start)
            return
        chunks = server.stream(**request)
        for _ in range(choose.randrange(1, 4)):
            next(chunks, None)
        chunks.close()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(200)))

    assert server.is_running()


def test_images_are_refused(server):
    refused = server.try_post("/generate", {"text": "What is this?", "image_data": "data:image/png;base64,AAAA"})

    assert refused.status_code == 400 and "recurrent layers" in refused.text
