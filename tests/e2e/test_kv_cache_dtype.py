"""`--kv-cache-dtype` sets the dtype of the target's and the drafter's KV.

`--speculative-draft-kv-cache-dtype` sets another dtype for the drafter's.
"""

import pytest
import torch
from serving import Settings

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's CPU engine has fp8 KV on AMX machines only")

# KV numbers per token: 4 layers of the target and 3 of the drafter, with keys and values of 2 heads of 64.
TARGET, DRAFTER = 4 * 2 * 2 * 64, 3 * 2 * 2 * 64


def num_cycles(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.fixture
def default_answers(keeper, prompts):
    """Answers of a server with DFLASH and float32 KV."""
    server = keeper.server(Settings("auto", flags=(("kv-cache-dtype", "auto"),)), dflash=True)
    return server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True)


# The drafter was trained on features of a target without quantised KV, so acceptance in fp8 is lower.
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "more_cycles"),
    [
        ("bf16", "bfloat16", 1.05),
        pytest.param("fp8_e4m3", "float8_e4m3fn", 1.5, marks=on_gpu),
        pytest.param("fp8_e5m2", "float8_e5m2", 1.5, marks=on_gpu),
    ],
)
def test_of_both(keeper, prompts, default_answers, kv_cache_dtype, dtype, more_cycles):
    server = keeper.server(Settings(kv_cache_dtype, flags=(("kv-cache-dtype", kv_cache_dtype),)), dflash=True)

    answers = server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True)

    described, size = server.internal_state()["sglang_dflash"], getattr(torch, dtype).itemsize
    assert described["kv_bytes_per_token"] == {"target": TARGET * size, "drafter": DRAFTER * size}
    assert described["kv_capacity_tokens"] == 20000
    per_token = f"{TARGET * size} bytes of the target, {DRAFTER * size} bytes of the drafter (torch.{dtype})"
    assert f"{per_token}; room for 20000" in server.log()
    assert f"three launches per layer for norms, RoPE and KV: its KV is stored in {dtype}." in server.log()
    assert num_cycles(answers) < more_cycles * num_cycles(default_answers)


def test_of_the_drafter_alone(keeper, prompts, default_answers):
    """The target's KV is float32, and so its text is unchanged."""
    flags = (("speculative-draft-kv-cache-dtype", "bf16"),)
    server = keeper.server(Settings("draft-bf16", dflash_flags=flags), dflash=True)

    answers = server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True)

    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in default_answers]
    sizes = server.internal_state()["sglang_dflash"]["kv_bytes_per_token"]
    assert sizes == {"target": TARGET * 4, "drafter": DRAFTER * 2}
    assert num_cycles(answers) < 1.05 * num_cycles(default_answers)
