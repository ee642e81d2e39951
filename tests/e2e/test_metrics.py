"""Acceptance in the open: in every answer, in `/server_info`, and in Prometheus' text."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import REQUESTS_SYNC


def exported(server, name):
    samples = [sample for family in text_string_to_metric_families(server.get("/metrics")) for sample in family.samples]
    return [sample for sample in samples if sample.name == name]


# Without overlap scheduling no cycle runs for a request that has ended, so that the counts are exact.
@pytest.mark.parametrize("settings", [REQUESTS_SYNC], indirect=True, ids=str)
def test_acceptance(pair, prompts):
    server = pair.dflash
    before = server.internal_state()["sglang_dflash"].get("verified_blocks", 0)
    exported_before = sum(sample.value for sample in exported(server, "sglang_dflash:verified_blocks_total"))

    answers = server.generate_concurrently(
        [{"input_ids": prompt, "max_new_tokens": 100, "ignore_eos": True} for prompt in prompts[:6]]
    )

    num_blocks = 0
    for answer in answers:
        info = answer["meta_info"]
        histogram = info["spec_correct_drafts_histogram"]
        assert sum(histogram) == info["spec_verify_ct"]
        assert sum(i * count for i, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
        # The prefill's token, and at most a block behind the last one that was asked for.
        assert 100 <= 1 + info["spec_num_correct_drafts"] + info["spec_verify_ct"] < 100 + 16
        num_blocks += info["spec_verify_ct"]
    described = server.internal_state()["sglang_dflash"]
    assert described["verified_blocks"] - before == num_blocks
    blocks = {int(s.labels["accept_length"]): s.value for s in exported(server, "sglang_dflash:verified_blocks_total")}
    assert sum(blocks.values()) - exported_before == num_blocks
    mean = sum(length * count for length, count in blocks.items()) / sum(blocks.values())
    assert described["acceptance_length"] == pytest.approx(mean)
    rates = described["acceptance_rate_by_position"]
    assert len(rates) == 15
    assert rates == sorted(rates, reverse=True)
    assert 1 + sum(rates) == pytest.approx(mean)
    assert set(described["time_share"]) == {"draft", "verify", "append"}
    assert sum(described["time_share"].values()) == pytest.approx(1)
    stages = {s.labels["stage"]: s.value for s in exported(server, "sglang_dflash:stage_seconds_total")}
    assert all(stages[stage] > 0 for stage in ("draft", "verify", "append"))
