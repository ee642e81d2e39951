"""The fuzzer, scripts/fuzz.py: two minutes of cases pass, and a planted error is found and shrunk."""

import random

import fuzz
import pytest
from fuzzing.cases import Case
from fuzzing.mixes import draw_rounds
from serving import with_plugin

pytestmark = pytest.mark.cpu(reason="the fuzzer serves on a CPU")
SEED, MINUTES = 1, 2


def test_nothing_differs(tmp_path):
    report = fuzz.fuzz(range(SEED, SEED + 1000), MINUTES, tmp_path, shrink_seconds=30)

    assert not report.findings, "\n".join(map(str, report.findings.values()))
    assert report.cases
    # Most answers are compared, and not excused.
    assert sum(count for name, count in report.statuses.items() if name.endswith("200")) > 20 * report.cases


@pytest.mark.parametrize(
    "error, kind", [("token", "output_ids"), ("logprob", "meta_info.output_token_logprobs"), ("page", "server")]
)
def test_planted_error(tmp_path, error, kind):
    case = Case(0, "tiny", [], [], [("PLANTED_ERROR", error), *with_plugin("planted_error")])
    [requests] = draw_rounds(case, random.Random(0), num_rounds=1, num_requests=16)
    case.rounds = [[request for request in requests if request["path"] == "/generate"]]
    # A server that ends takes long to start again.
    fuzzer = fuzz.Fuzzer(tmp_path, tmp_path, shrink_seconds=0 if error == "page" else 60)
    try:
        fuzzer.run(case)
    finally:
        fuzzer.stop()

    assert fuzzer.report.findings[0].difference.kind == kind
    [requests, *others] = Case.load(tmp_path / "0.json").rounds
    if error != "page":
        assert len(requests) == 1 and not others
        fields = {*requests[0]["body"], *requests[0]["body"]["sampling_params"]}
        needed = {"input_ids", "sampling_params", "temperature", "max_new_tokens", "return_logprob", "stream"}
        assert fields <= needed
