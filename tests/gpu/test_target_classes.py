"""Targets of every class, with random weights and drafts that are their own continuation, an error now and then.

So every row of a block and every acceptance length counts. In float32 on triton, where nothing depends on a batch, the
text is the same to the last token, in as many cycles as the errors make; in bf16 on the other backends up to ties.
"""

import json
import os

import pytest
from engine_process import run
from targets import PLUGIN, TARGETS, dflash, drafts, expected_cycles, requests, write_pair
from ties import describe_difference, first_difference

NUM_REQUESTS, NEW_TOKENS = 8, 160
ENGINE = {
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "mem_fraction_static": 0.9,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
}
# As servers of tests/e2e are started on a GPU, so that nothing rounds otherwise in a larger batch.
EXACT = {"dtype": "float32", "attention_backend": "triton", "enable_deterministic_inference": True}
EXACT_ENV = {"TRITON_F32_DEFAULT": "ieee", "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "1"}
# Of two logits in bf16, that reach 16, where neighbouring numbers are 0.125 apart; another expert adds its share.
TIE, TIE_OF_EXPERTS = 0.25, 0.5


def generate(folder, name: str, flags: dict, env: dict) -> list[tuple[dict, dict, list[int]]]:
    """Each answer without speculation, with DFLASH, and what was drafted for it."""
    engine = write_pair(folder, name) | ENGINE | flags
    env = env | {"PYTHONPATH": f"{PLUGIN}:{os.environ.get('PYTHONPATH', '')}"}
    asked = requests(NUM_REQUESTS, NEW_TOKENS)
    call = {key: [request[key] for request in asked] for key in ("input_ids", "sampling_params")}
    [plain], described = run(folder, engine, [call | {"return_logprob": True, "top_logprobs_num": 2}], env)
    assert described is None
    drafted = [drafts(prompt, answer["output_ids"]) for prompt, answer in zip(call["input_ids"], plain)]
    (folder / "drafts.json").write_text(
        json.dumps([{"input_ids": p, "output_ids": d} for p, d in zip(call["input_ids"], drafted)])
    )
    env["ORACLE_DRAFTS"] = str(folder / "drafts.json")
    [answers], described = run(folder, engine | dflash(folder), [call], env)
    assert described["worker"] == "DFlashWorker"
    return list(zip(plain, answers, drafted))


def report(name: str, answers: list[tuple[dict, dict, list[int]]]) -> None:
    same = sum(first_difference(plain, got) is None for plain, got, _ in answers)
    cycles = sum(got["meta_info"]["spec_verify_ct"] for _, got, _ in answers)
    tokens = sum(len(got["output_ids"]) - 1 for _, got, _ in answers)
    variety = [len(set(plain["output_ids"])) for plain, _, _ in answers]
    print(f"\n{name}: {same} of {len(answers)} identical, {tokens / cycles:.2f} tokens per cycle, different: {variety}")
    for i, (plain, got, _) in enumerate(answers):
        if first_difference(plain, got) is not None:
            print(f"  answer {i} {describe_difference(plain, got)}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_exact(name, tmp_path):
    answers = generate(tmp_path, name, EXACT, EXACT_ENV)
    report(f"{name}, float32 on triton", answers)
    for plain, got, drafted in answers:
        # A text that repeats itself would hide what attention sees.
        assert len(set(plain["output_ids"])) > 20
        assert got["output_ids"] == plain["output_ids"]
        assert got["meta_info"]["spec_verify_ct"] == expected_cycles(plain["output_ids"], drafted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, target in TARGETS.items() for backend in target.backends]
)
def test_up_to_ties(name, backend, tmp_path):
    answers = generate(tmp_path, name, {"dtype": "bfloat16", "attention_backend": backend}, {})
    report(f"{name}, bf16 on {backend}", answers)
    tie = TIE_OF_EXPERTS if TARGETS[name].has_experts else TIE
    for plain, got, drafted in answers:
        differs = first_difference(plain, got)
        if differs is None:
            assert got["meta_info"]["spec_verify_ct"] == expected_cycles(plain["output_ids"], drafted)
        else:
            best, second = (entry[0] for entry in plain["meta_info"]["output_top_logprobs"][differs][:2])
            assert best - second <= tie, describe_difference(plain, got)
