"""Files of the project agree on versions."""

import re
import tomllib
from pathlib import Path

import yaml

from sglang_dflash.version import __version__

CHECKOUT = Path(__file__).parents[2]


def project(folder: Path = CHECKOUT) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def test_pre_commit_runs_the_pinned_ruff():
    (repository,) = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text())["repos"]
    (pinned,) = re.findall(r"^ruff==(.+)$", (CHECKOUT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert repository["rev"] == f"v{pinned}"
    assert {hook["id"] for hook in repository["hooks"]} == {"ruff-check", "ruff-format"}


def test_ruff_targets_the_oldest_python():
    python = project()["project"]["requires-python"].removeprefix(">=")
    assert project()["tool"]["ruff"]["target-version"] == "py" + python.replace(".", "")
    assert project(CHECKOUT / "cpu")["project"]["requires-python"] == f">={python}"


def test_cpu_plugin_goes_with_this_package():
    plugin = project(CHECKOUT / "cpu")["project"]
    assert plugin["version"] == __version__
    assert f"sglang-dflash=={__version__}" in plugin["dependencies"]


def test_one_version_of_sglang():
    (required,) = project()["project"]["dependencies"]
    (pinned,) = re.findall(r"^sglang==(.+)$", (CHECKOUT / "requirements/cpu-nodeps.txt").read_text(), re.MULTILINE)
    (installed,) = re.findall(r"^SGLANG_VERSION=(.+)$", (CHECKOUT / "scripts/install.sh").read_text(), re.MULTILINE)
    assert required == f"sglang=={pinned}.*"
    assert installed == pinned
