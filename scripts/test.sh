#!/usr/bin/env bash
# Every check of this repository, on any machine; stops at the first that fails.
#
# Without a GPU everything runs on SGLang's CPU engine, Triton kernels in Triton's interpreter, and tests/gpu is skipped.
# With one, tests/e2e serve on it, all but those that say why not.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$REPO"
make_smollm2

if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" = False ]; then
    # One thread: SGLang's processes, with a thread per core each, would mostly wait for each other.
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
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
# What Triton's interpreter runs keeps one core busy, beside tests that mostly wait for processes of theirs. These are
# processes of their own anyway: the interpreter is chosen when Triton is imported.
log="$(mktemp)"
beside=
trap 'kill $beside 2>/dev/null || true; rm -f "$log"' EXIT
start_beside() {
    "${pytest[@]}" "$@" >"$log" 2>&1 &
    beside=$!
}
finish_beside() {
    local status=0
    wait "$beside" || status=$?
    cat "$log"
    return "$status"
}
start_beside tests/kernels
step "tests/unit" "${pytest[@]}" tests/unit
step "tests/contract" "${pytest[@]}" tests/contract
step "tests/kernels" finish_beside
start_beside tests/e2e -m slow
step "tests/gpu" "${pytest[@]}" tests/gpu
step "tests/e2e" "${pytest[@]}" tests/e2e -m "not slow"
step "tests/e2e, slow" finish_beside

printf '\nAll passed in %d min %d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
