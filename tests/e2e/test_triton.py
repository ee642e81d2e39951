"""SGLang's Triton attention, with the kernels of a GPU in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import assert_same_cycles
from serving import DEFAULT, ENV, Settings, with_plugin

pytestmark = pytest.mark.cpu(reason="Triton's interpreter, and torch_native, are for the CPU; see tests/gpu")

NEW_TOKENS = 10


def settings(target: str, drafter: str | None) -> Settings:
    return Settings(
        f"{target}-{drafter or 'same'}",
        flags=(("attention-backend", target),),
        dflash_flags=(("speculative-draft-attention-backend", drafter),) if drafter else (),
        env=(("TRITON_INTERPRET", "1"), *with_plugin("fast_interpreter")),
        plain=DEFAULT,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "draft_backend"),
    [
        (settings("triton", None), "triton"),
        (settings("triton", "torch_native"), "torch_native"),
        (settings("torch_native", "triton"), "triton"),
    ],
    indirect=["settings"],
    ids=str,
)
def test_backends_of_target_and_drafter(pair, prompts, oracle, draft_backend):
    assert pair.dflash.internal_state()["sglang_dflash"]["draft_attention_backend"] == draft_backend
    some = [prompts[0][:20], prompts[1]]

    answers = pair.lossless(lambda server: server.generate(some, max_new_tokens=NEW_TOKENS, ignore_eos=True))

    for prompt, answer in zip(some, answers):
        assert_same_cycles(answer, oracle.generate(prompt, NEW_TOKENS, ignore_eos=True))


@pytest.mark.slow
def test_masks(tmp_path):
    """Every mask of a drafter layer, and masks of a target whose sliding layers have a separate pool."""
    script, output = Path(__file__).parents[1] / "support" / "masks.py", tmp_path / "errors.json"
    command = [sys.executable, script, "triton", "float32", "16", "8", "2", "128", output]
    environment = os.environ | ENV | {"TRITON_INTERPRET": "1"} | dict(with_plugin("fast_interpreter"))
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert run.returncode == 0, run.stderr[-4000:]
    errors = json.loads(output.read_text())
    assert len(errors) == 16 and max(errors.values()) < 1e-5
