#!/usr/bin/env bash
# Ask SGLang servers with DFLASH and without the same question, compare the texts, and show the drafted tokens.
#
#   usage: demo.sh [--pair smollm2|tiny|hybrid] [--plain] [QUESTION]
#
#   --pair smollm2   SmolLM2-135M-Instruct, a chat model (default); its weights are downloaded once, 93 MB
#   --pair tiny      4 million parameters, in this repository; continues Python code
#   --pair hybrid    2.8 million parameters, in this repository; a target of Qwen3.5's class with recurrent layers
#   --plain          brackets instead of colours
set -euo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

pair=smollm2
ask=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage 0 ;;
    --pair) pair="${2-}" && shift 2 || usage 2 ;;
    --plain) ask+=(--plain) && shift ;;
    -*) usage 2 >&2 ;;
    *) ask+=(--question "$1") && shift ;;
    esac
done

case "$pair" in
tiny | hybrid | smollm2) ;;
*) usage 2 >&2 ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$REPO"

PAIR="$REPO/models/$pair"
TARGET="$PAIR/target"
if [ "$pair" = smollm2 ]; then
    make_smollm2
    TARGET="$SMOLLM2"
fi
WORK="$(mktemp -d)"
SERVER=
CLIENT=

stop_server() {
    [ -n "$SERVER" ] || return 0
    # The process group has the HTTP server, the scheduler and the detokenizer.
    kill -TERM -- "-$SERVER" 2>/dev/null || true
    sleep 1
    kill -KILL -- "-$SERVER" 2>/dev/null || true
    SERVER=
}

cleanup() {
    if [ -n "$CLIENT" ]; then
        kill -KILL "$CLIENT" 2>/dev/null || true
        wait "$CLIENT" 2>/dev/null || true
    fi
    stop_server
    rm -rf "$WORK"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

flags=(--model-path "$TARGET" --host 127.0.0.1 --max-running-requests 8 --max-total-tokens 8192)
if [ "$pair" = hybrid ]; then
    # By default SGLang would give states most of the memory.
    flags+=(--max-mamba-cache-size 64)
fi
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" = False ]; then
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 SGLANG_MAMBA_CONV_DTYPE=float32
    flags+=(--device cpu --dtype float32 --attention-backend torch_native)
fi

serve_and_ask() { # name, flags of launch_server
    local name=$1 port log="$WORK/$1.log"
    shift
    port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    printf '\n[%s] python -m sglang.launch_server %s\n' "$name" "${*:-(no speculation)}"
    # A new session, so that the whole process group can be stopped.
    setsid "$PYTHON" -m sglang.launch_server "${flags[@]}" --port "$port" "$@" >"$log" 2>&1 &
    SERVER=$!
    disown "$SERVER" # otherwise bash reports its end
    # In the background, because bash handles signals during `wait`, but not while a command runs.
    "$PYTHON" scripts/demo.py ask --pair "$pair" --name "$name" --url "http://127.0.0.1:$port" --pid "$SERVER" \
        --tokenizer "$TARGET" --result "$WORK/$name.json" "${ask[@]}" &
    CLIENT=$!
    if ! wait "$CLIENT"; then
        printf '\nThe server said last:\n' >&2
        tail -n 20 "$log" >&2
        exit 1
    fi
    CLIENT=
    stop_server
}

dflash=(--speculative-algorithm DFLASH --speculative-draft-model-path "$PAIR/drafter")
if [ "$pair" = smollm2 ]; then
    # On a CPU a whole block takes much longer than the tokens of it that are accepted.
    dflash+=(--speculative-adaptive)
fi
serve_and_ask dflash "${dflash[@]}"
serve_and_ask plain
"$PYTHON" scripts/demo.py compare --pair "$pair" "$WORK/dflash.json" "$WORK/plain.json"
