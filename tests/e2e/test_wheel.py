"""The wheel has the serving code and nothing else, and serves in an environment without this checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest
from oracle import assert_same_cycles
from serving import DEVICE_FLAGS, ENV

from models.tiny import DRAFTER_DIR, TARGET_DIR

CHECKOUT = Path(__file__).parents[2]
# What a build reads.
SOURCES = ("pyproject.toml", "docs/package.md", "LICENSE", "NOTICE", "sglang_dflash")
MAX_BYTES = 2_000_000
MAX_NEW_TOKENS = 40

ANSWER = """
import json, sys
import sglang
import sglang_dflash

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    engine = sglang.Engine(**request["engine"])
    answer = engine.generate(input_ids=request["input_ids"], sampling_params=request["sampling_params"])
    state = engine.get_server_info()["internal_states"][0]["sglang_dflash"]
    engine.shutdown()
    print("RESULT", json.dumps({"file": sglang_dflash.__file__, "worker": state["worker"], "answer": answer}))
"""


def run(command: list, **env: str) -> str:
    """Return the stdout of a program that knows nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    process = subprocess.run(
        [*map(str, command)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        start_new_session=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def pip(python: Path | str, *arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "-q"]
    run([*command, *arguments, "--no-deps", "--no-build-isolation"])


def copy_sources(folder: Path) -> Path:
    """Return a copy of the checkout, as a build leaves files in it."""
    folder.mkdir()
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", copy_sources(folder / "checkout"), "--wheel-dir", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def environment(tmp_path) -> Path:
    """Return the Python of a new environment that has SGLang and the CPU plugin, and not this package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("sglang_dflash-", "sglang_dflash.", "__editable__")):
            (packages / entry.name).symlink_to(entry)
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"])
    (site_packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site_packages / "sglang.pth").write_text(f"{packages}\n")
    return tmp_path / "environment/bin/python"


def test_contents(wheel):
    assert wheel.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = {Path(name).name: archive.read(name).decode() for name in names if "dist-info/" in name}
    modules = {name for name in names if "dist-info/" not in name}
    assert modules == {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "sglang_dflash").rglob("*.py")}

    entry_points = ConfigParser()
    entry_points.read_string(texts["entry_points.txt"])
    assert {name: dict(entry_points[name]) for name in entry_points.sections()} == {
        "sglang.srt.plugins": {"dflash": "sglang_dflash.plugin:register"}
    }
    metadata = message_from_string(texts["METADATA"])
    assert metadata.get_all("Requires-Dist") == ["sglang==0.5.23.*"]
    description = metadata.get_payload()
    assert "DFlash speculative decoding" in description
    # A package index shows no file of the repository.
    assert not re.findall(r"\]\((?!https://)", description)


@pytest.mark.cpu(reason="the environment is made of .venv's packages")
def test_wheel_serves(wheel, environment, prompts, oracle):
    pip(environment, "install", wheel)
    request = {
        "engine": {flag.replace("-", "_"): value for flag, value in DEVICE_FLAGS.items()}
        | {"model_path": str(TARGET_DIR), "dtype": "float32", "max_total_tokens": 4000, "skip_tokenizer_init": True}
        | {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)},
        "input_ids": prompts[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
    }

    output = run([environment, "-c", ANSWER, json.dumps(request)], **ENV)

    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert Path(result["file"]).is_relative_to(environment.parents[1])
    assert result["worker"] == "DFlashWorker"
    assert_same_cycles(result["answer"], oracle.generate(prompts[0], MAX_NEW_TOKENS))


@pytest.mark.cpu(reason="the environment is made of .venv's packages")
def test_torch_is_imported_without_the_checkout(environment, tmp_path):
    """PyTorch loads entry points with every import: none may be of a checkout that has been moved away."""
    checkout = copy_sources(tmp_path / "checkout")
    pip(environment, "install", "--editable", checkout)
    find = "import sglang_dflash; print(sglang_dflash.__file__)"
    assert Path(run([environment, "-c", find]).strip()).is_relative_to(checkout)

    checkout.rename(tmp_path / "moved")

    run([environment, "-c", "import torch"])
