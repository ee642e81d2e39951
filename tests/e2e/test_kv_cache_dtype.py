"""`--kv-cache-dtype` is the target's: the drafter's keys and values keep the model's dtype."""

import pytest
from serving import Settings

FP8 = Settings("fp8-kv", flags=(("kv-cache-dtype", "fp8_e5m2"),))


@pytest.mark.parametrize("settings", [FP8], indirect=True, ids=str)
def test_fp8(pair, prompts):
    dflash, plain = pair.ask(lambda server: server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True))

    described = pair.dflash.internal_state()["sglang_dflash"]
    # 4 layers of the target and 3 of the drafter, with keys and values of 2 heads of 64.
    assert described["kv_bytes_per_token"] == {"target": 4 * 2 * 2 * 64 * 1, "drafter": 3 * 2 * 2 * 64 * 4}
    assert described["kv_capacity_tokens"] == 20000
    assert "1024 bytes of the target, 3072 bytes of the drafter (torch.float32); room for 20000" in pair.dflash.log()
    # A rounding of float32 can change an fp8 number by a quarter, so now and then the texts part.
    same = [mine["output_ids"] == expected["output_ids"] for mine, expected in zip(dflash, plain)]
    assert sum(same) >= 10
    assert sum(answer["meta_info"]["spec_verify_ct"] for answer in dflash) < 20 * 64 / 2.5
