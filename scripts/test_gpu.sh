#!/usr/bin/env bash
# Run tests/gpu with several processes at a time on each GPU. SGLang takes most of a minute to start, and the small models
# of the tests use little of a GPU. FOLDER gets the logs, and a table of the results in the order in which tests end.
#
# usage: test_gpu.sh FOLDER [PROCESSES [SECONDS [TEST ...]]]
#   PROCESSES  number of processes per GPU (default 8)
#   SECONDS    time limit of a test (default 580)
#   TEST       argument of pytest
set -euo pipefail

out=$(realpath -m "$1") processes=${2:-8} seconds=${3:-580}
shift $(($# < 3 ? $# : 3))
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
gpus=$(nvidia-smi --list-gpus | wc -l)
# The first measures free memory, the second needs several GPUs.
alone=(tests/gpu/test_pool.py tests/gpu/test_tensor_parallel.py)
pytest=(python3 -m pytest -q -rA -s -p no:cacheprovider -W ignore --answers "$out/answers")

if [ $# -eq 0 ]; then
    mapfile -t tests < <("${pytest[@]}" --collect-only tests/gpu "${alone[@]/#/--ignore=}" 2>/dev/null | grep ::)
else
    tests=("$@")
fi

run_one() { # FOLDER SECONDS TEST COMMAND...
    local out=$1 seconds=$2 test=$3 started=$SECONDS status=0
    shift 3
    local log="$out/$(tr -c 'A-Za-z0-9_\n-' _ <<<"${test#tests/gpu/}").log"
    timeout "$seconds" "$@" "$test" >"$log" 2>&1 || status=$?
    printf '%s %4d s  %s\n' "$([ $status = 0 ] && echo passed || echo "FAILED $status")" $((SECONDS - started)) "$test"
    grep -aE "^[^E>].*(identical|tokens per cycle|alone and beside|differs at|p = 0)" "$log" | sort -u | head -12 |
        sed 's/^/    /'
}
run_in_slot() { # GPUS FOLDER SECONDS TEST COMMAND...
    export CUDA_VISIBLE_DEVICES=$((SLOT % $1))
    shift
    run_one "$@"
}
export -f run_one run_in_slot
printf '%s\n' "${tests[@]}" | xargs -d '\n' -P $((processes * gpus)) --process-slot-var=SLOT -I TEST \
    bash -c 'run_in_slot "$@"' _ "$gpus" "$out" "$seconds" TEST "${pytest[@]}" | tee "$out/table.txt"
if [ $# -eq 0 ]; then
    for test in "${alone[@]}"; do
        run_one "$out" "$seconds" "$test" "${pytest[@]}" | tee -a "$out/table.txt"
    done
fi
! grep -q ^FAILED "$out/table.txt"
