"""The tiny and the hybrid pair on several GPUs in bf16: lossless up to ties, and no rank waits for another forever.

Targets and drafters have two KV heads each, fewer than four ranks.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serving import REQUEST_SECONDS, Pair, ServerKeeper, Settings
from support.ties import compare, tokens_per_cycle
from transformers import AutoTokenizer

from models import hybrid, tiny

# As in test_tiny_pair.py.
TIE = 0.25
# Tokens per cycle of one rank, and identical texts of 60. The hybrid pair verifies trees.
USUAL = {"chains": (5.23, 40), "trees": (6.44, 45), "hybrid": (5.39, 51)}

FLAGS = (
    ("device", "cuda"),
    ("dtype", "bfloat16"),
    ("attention-backend", "fa3"),
    # It would replace the all-reduce that servers have by default.
    ("enable-deterministic-inference", None),
    ("disable-prefill-cuda-graph", True),
)
CHAINS = (("speculative-eagle-topk", 1),)
# By default SGLang would give states most of the memory.
HYBRID = (("model-path", str(hybrid.TARGET_DIR)), ("max-mamba-cache-size", 100))
HYBRID_DRAFTER = (("speculative-draft-model-path", str(hybrid.DRAFTER_DIR)),)
# NVLink multicast can take down the GPUs of a host that others share.
ENV = (("SGLANG_USE_CPU_ENGINE", "0"), ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"))

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "regex": "[a-z ]{20,40}", "ignore_eos": False},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "frequency_penalty": 0.7, "return_logprob": True},
    {"n": 2, "temperature": 0.7},
    {"ignore_eos": False, "stop": ["\n\n"]},
    {"abort": True},
    {"disconnect": True},
]
NUM_REQUESTS = 500


def with_ranks(name: str) -> object:
    return pytest.param(name, id=name, marks=pytest.mark.alone(gpus=int(name.split("-")[0])))


@pytest.fixture(scope="module", params=[with_ranks(name) for name in ("2-trees", "2-chains", "2-hybrid", "4-trees")])
def servers(request, tmp_path_factory):
    """Two servers on the same GPUs, with DFLASH and without."""
    ranks, shape = request.param.split("-")
    if torch.cuda.device_count() < int(ranks):
        pytest.skip(f"needs {ranks} GPUs")
    keeper = ServerKeeper(tmp_path_factory.mktemp(f"tp{request.param}"))
    flags = (("tp-size", int(ranks)), *FLAGS, *(HYBRID if shape == "hybrid" else ()))
    # Trees are the default.
    dflash_flags = {"chains": CHAINS, "hybrid": HYBRID_DRAFTER, "trees": ()}[shape]
    yield keeper.pair(Settings(request.param, flags=flags, dflash_flags=dflash_flags, env=ENV))
    keeper.stop()


@pytest.fixture(scope="module")
def prompts(servers) -> list[list[int]]:
    """Return the tiny pair's prompts in the target's tokens."""
    is_hybrid = servers.dflash.settings.name.endswith("hybrid")
    return AutoTokenizer.from_pretrained((hybrid if is_hybrid else tiny).TARGET_DIR)(tiny.load_prompts())["input_ids"]


@pytest.fixture
def pair(servers):
    """Check after the test that no request runs on and no KV slot is in use."""
    yield servers
    servers.ask(lambda server: server.flush_cache())
    servers.ask(lambda server: server.wait_until_empty())


@pytest.mark.gpu
@pytest.mark.group("tensor-parallel-{servers}")
def test_lossless_and_acceptance(pair: Pair, prompts):
    requests = [{"input_ids": prompt, "max_new_tokens": 128, "ignore_eos": True} for prompt in prompts]
    with_best = [request | {"return_logprob": True, "top_logprobs_num": 2} for request in requests]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests if server.dflash else with_best))

    compared, rate = compare(plain, dflash), tokens_per_cycle(dflash)
    name, (usual_rate, usual_identical) = pair.dflash.settings.name, USUAL[pair.dflash.settings.name.split("-")[1]]
    described = pair.dflash.internal_state()["sglang_dflash"]
    assert described["verified_as"] == ("chains" if name.endswith("chains") else "trees")
    print(f"\ntp {name}: {compared}, {rate:.3f} tokens per cycle")
    compared.assert_ties(TIE)
    compared.assert_floor(usual_identical)
    assert rate == pytest.approx(usual_rate, rel=0.05 if name.endswith("chains") else 0.15)


@pytest.mark.gpu
@pytest.mark.group("tensor-parallel-{servers}")
def test_500_mixed_requests(pair: Pair, prompts):
    """Ranks that choose different tokens would also use different lengths, and wait for each other forever."""

    def ask(index: int) -> list[dict]:
        kind = KINDS[index % len(KINDS)]
        prompt = prompts[index % len(prompts)][: 1 + index // 4]
        options = {"max_new_tokens": 1 + 7 * index % 90, "ignore_eos": True} | kind
        if "abort" in kind or "disconnect" in kind:
            return leave(pair, prompt, index, "abort" in kind)
        answers = pair.dflash.generate(prompt, **options)
        return answers if isinstance(answers, list) else [answers]

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(NUM_REQUESTS), timeout=REQUEST_SECONDS))

    for index, of_request in enumerate(answers):
        kind = KINDS[index % len(KINDS)]
        if "disconnect" in kind:
            continue
        assert len(of_request) == kind.get("n", 1)
        for answer in of_request:
            reason = answer["meta_info"]["finish_reason"]["type"]
            assert (reason == "abort") == ("abort" in kind)
            if kind.get("ignore_eos", "abort" not in kind):
                assert len(answer["output_ids"]) == 1 + 7 * index % 90
            if "regex" in kind:
                assert re.fullmatch("[a-z ]{0,40}", answer["text"])


def leave(pair: Pair, prompt: list[int], index: int, abort: bool) -> list[dict]:
    """Abort a long answer after four chunks, or close its stream. Return the last chunk that was read."""
    stream = pair.dflash.stream(prompt, max_new_tokens=1700, ignore_eos=True, rid=f"request-{index}")
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 4:
            if not abort:
                stream.close()
                break
            pair.dflash.post("/abort_request", {"rid": f"request-{index}"})
    return chunks[-1:]
