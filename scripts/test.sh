#!/usr/bin/env bash
# Every check of this repository, on any machine; stops at the first that fails.
#
# Without a GPU everything runs on SGLang's CPU engine, Triton kernels in Triton's interpreter, and tests/gpu is skipped.
# With one, tests/e2e serve on it, all but those that say why not.
set -euo pipefail

if [ $# -gt 0 ]; then
    printf 'usage: test.sh, without arguments; it got: %s\n' "$*" >&2
    exit 2
fi

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$REPO"
make_smollm2

if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" = False ]; then
    # One thread: SGLang's processes, with a thread per core each, would mostly wait for each other.
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    # Two processes of pytest, which take their next test, file or group of tests when they have nothing left to do.
    each_test=(-n 2 --dist worksteal) each_file=(-n 2 --dist loadfile) each_group=(-n 2 --dist loadgroup)
else
    each_test=() each_file=() each_group=()
fi

step() {
    local name=$1 started=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    if ! "$@"; then
        printf '=== %s FAILED after %d s\n' "$name" $((SECONDS - started))
        exit 1
    fi
    printf '=== %s passed in %d s\n' "$name" $((SECONDS - started))
}

pytest=("$PYTHON" -m pytest -q -ra -p no:cacheprovider -W ignore --durations=40)

step "ruff check" "$PYTHON" -m ruff check .
step "ruff format" "$PYTHON" -m ruff format --check .
# Kernels are a run of their own: Triton's interpreter is chosen when Triton is imported. Tests of one file share what they
# start, and in tests/e2e those of the same settings.
step "tests/kernels" "${pytest[@]}" "${each_test[@]}" tests/kernels
step "tests/unit" "${pytest[@]}" "${each_file[@]}" tests/unit
step "tests/contract" "${pytest[@]}" "${each_file[@]}" tests/contract
step "tests/gpu" "${pytest[@]}" tests/gpu
step "tests/e2e" "${pytest[@]}" "${each_group[@]}" tests/e2e

printf '\nAll passed in %d min %d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
