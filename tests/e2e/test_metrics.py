"""Acceptance statistics in every answer, in `/server_info`, and in Prometheus' text."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import REQUESTS_SYNC, TREES_PAGED


def exported(server, name):
    samples = [sample for family in text_string_to_metric_families(server.get("/metrics")) for sample in family.samples]
    return [sample for sample in samples if sample.name == name]


# Without overlap scheduling no cycle runs for a request that has ended, so the counts are exact.
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
        # The prefill's token, and less than a block past the requested length.
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


@pytest.mark.parametrize("settings", [TREES_PAGED], indirect=True, ids=str)
def test_ranks_of_accepted_drafts(pair, prompts):
    server = pair.dflash

    def counts() -> list[int]:
        return server.internal_state()["sglang_dflash"].get("accepted_drafts_by_rank", [0] * 8)

    def exported_counts() -> dict[int, float]:
        samples = exported(server, "sglang_dflash:accepted_tree_drafts_total")
        return {int(sample.labels["rank"]): sample.value for sample in samples}

    before = counts()
    answers = server.generate_concurrently(
        [{"input_ids": prompt, "max_new_tokens": 80, "ignore_eos": True} for prompt in prompts[:5]]
    )

    gained = [now - then for now, then in zip(counts(), before, strict=True)]
    assert sum(gained) == sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    # Most are the best candidate of their position; trees add the others.
    assert gained[0] > sum(gained) / 2 and sum(gained[1:]) > 0.05 * sum(gained)
    assert exported_counts() == {rank: pytest.approx(count) for rank, count in enumerate(counts(), start=1)}
