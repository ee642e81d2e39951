"""`--kv-cache-dtype` is that of the target's keys and values and of the drafter's."""

import pytest
from serving import Settings


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8(keeper, prompts, kv_cache_dtype, dtype):
    server = keeper.server(Settings(kv_cache_dtype, flags=(("kv-cache-dtype", kv_cache_dtype),)), dflash=True)

    answers = server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True)

    described = server.internal_state()["sglang_dflash"]
    # 4 layers of the target and 3 of the drafter, with keys and values of 2 heads of 64.
    assert described["kv_bytes_per_token"] == {"target": 4 * 2 * 2 * 64 * 1, "drafter": 3 * 2 * 2 * 64 * 1}
    assert described["kv_capacity_tokens"] == 20000
    assert f"1024 bytes of the target, 768 bytes of the drafter (torch.{dtype}); room for 20000" in server.log()
    assert f"three launches per layer for norms, RoPE and KV: its KV is stored in {dtype}." in server.log()
    # 3 tokens per cycle where float32 has 4.3: the drafter was trained on the features of an unquantised target.
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert 20 * 63 / cycles > 2.5
