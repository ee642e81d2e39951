"""`--kv-cache-dtype` is the target's: the drafter's keys and values keep the model's dtype."""

from serving import Settings

FP8 = Settings("fp8-kv", flags=(("kv-cache-dtype", "fp8_e5m2"),))


def test_fp8(keeper, prompts):
    server = keeper.server(FP8, dflash=True)

    answers = server.generate(prompts[:20], max_new_tokens=64, ignore_eos=True)

    described = server.internal_state()["sglang_dflash"]
    # 4 layers of the target and 3 of the drafter, with keys and values of 2 heads of 64.
    assert described["kv_bytes_per_token"] == {"target": 4 * 2 * 2 * 64 * 1, "drafter": 3 * 2 * 2 * 64 * 4}
    assert described["kv_capacity_tokens"] == 20000
    assert "1024 bytes of the target, 3072 bytes of the drafter (torch.float32); room for 20000" in server.log()
    # 3 tokens per cycle where float32 has 4.3: the drafter was trained on the features of an unquantised target.
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert 20 * 63 / cycles > 2.5
