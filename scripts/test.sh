#!/usr/bin/env bash
# Run every check of this repository, on any machine. Stop at the first failure.
#
# Without a GPU everything runs on SGLang's CPU engine and Triton's interpreter, and tests/gpu is skipped.
# With a GPU, tests/e2e run on it, except those that give a reason to skip.
set -euo pipefail

if [ $# -gt 0 ]; then
    printf 'usage: test.sh takes no arguments, but got: %s\n' "$*" >&2
    exit 2
fi

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$REPO"
make_smollm2

if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" = False ]; then
    # One thread per process: with a thread per core each, SGLang's processes would mostly wait for each other.
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    # Two processes of pytest. An idle one takes the next test, file or group of tests.
    each_test=(-n 2 --dist worksteal) each_file=(-n 2 --dist loadfile) each_group=(-n 2 --dist loadgroup)
    on_gpu=()
else
    each_test=() each_file=() each_group=()
    on_gpu=("$PYTHON" scripts/test_gpu.py "$(mktemp -d)")
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
# tests/kernels is a separate run, because Triton chooses its interpreter on import. In tests/contract, tests of one file
# share the processes that they start. In tests/e2e, tests with the same settings share servers.
step "tests/kernels" "${pytest[@]}" "${each_test[@]}" tests/kernels
step "tests/unit" "${pytest[@]}" "${each_test[@]}" tests/unit
step "tests/contract" "${pytest[@]}" "${each_file[@]}" tests/contract
[ ${#on_gpu[@]} = 0 ] || step "tests/gpu" "${on_gpu[@]}"
step "tests/e2e" "${pytest[@]}" "${each_group[@]}" tests/e2e

printf '\nAll passed in %d min %d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
