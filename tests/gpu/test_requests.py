"""Requests of every kind on a GPU: penalties, grammars, logit processors, log probabilities, seeded sampling."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ties import first_difference

HERE = Path(__file__).parent

# Largest error of a log probability in bf16, and of the distance of two. The target's logits reach 32 to 64, where
# neighbouring bf16 numbers are 0.25 apart. Most errors are much smaller.
TIE = 0.25
MEAN_ERROR = 0.02
# The same in float32: decoding and verification sum in another order. Triton must not multiply in TF32.
EXACT_ERROR = 1e-3
IEEE = {"TRITON_F32_DEFAULT": "ieee"}


@pytest.fixture
def answers(tmp_path):
    def of(kind: str) -> list[tuple[dict, dict]]:
        """Return pairs of answers, without speculation and with DFLASH."""
        found = {}
        for mode in ("plain", "dflash"):
            output = tmp_path / f"{kind}-{mode}.json"
            command = [sys.executable, HERE / "generate_requests.py", kind, mode, output]
            run = subprocess.run(command, env=os.environ | IEEE, capture_output=True, text=True, timeout=300)
            assert run.returncode == 0, run.stderr[-4000:]
            found[mode] = json.loads(output.read_text())
        assert found["plain"]["worker"] is None
        assert found["dflash"]["worker"]["worker"] == "DFlashWorker"
        return list(zip(found["plain"]["results"], found["dflash"]["results"]))

    return of


@pytest.mark.gpu
def test_greedy(answers):
    """The tokens in bf16 are the same up to the first tie, and so are the log probabilities before it.

    Log probabilities are those after penalties, biases, processors and grammars. So a tie is between allowed tokens.
    """
    same, errors = 0, []
    for want, got in answers("greedy"):
        differs = first_difference(want, got)
        errors += [abs(a - b) for a, b in zip(got["logprobs"][:differs], want["logprobs"][:differs])]
        if differs is None:
            assert len(got["output_ids"]) == len(want["output_ids"])
            same += 1
        else:
            best, second = want["top2"][differs]
            assert best - second <= TIE, f"differs at {differs}, where the best token leads by {best - second}"
    mean = sum(errors) / len(errors)
    print(f"\n{same} of 32 identical; log probabilities off by {mean:.4f} on average, {max(errors):.4f} at most")
    assert same >= 16
    assert max(errors) <= TIE
    assert mean <= MEAN_ERROR


@pytest.mark.gpu
def test_seeded(answers):
    """The samples in float32 are the same, unless one is within rounding of the boundary between two tokens.

    Rounding changes log probabilities by about 1e-5. So it affects about one sample in 1e5, and there are 1920.
    """
    pairs = answers("seeded")
    errors, partings = [], []
    for i, (want, got) in enumerate(pairs):
        differs = first_difference(want, got)
        errors += [abs(a - b) for a, b in zip(got["logprobs"][:differs], want["logprobs"][:differs])]
        if differs is not None:
            partings.append(f"request {i} at {differs}: {got['logprobs'][differs]} for {want['logprobs'][differs]}")
    print(
        f"\n{len(pairs) - len(partings)} of {len(pairs)} identical; log probabilities off by {max(errors):.1e} at most"
    )
    print(f"partings: {partings}")
    assert max(errors) <= EXACT_ERROR
    assert len(partings) <= 1
    assert sum(got["verify_ct"] for _, got in pairs) < sum(len(got["output_ids"]) for _, got in pairs)
