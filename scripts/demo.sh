#!/usr/bin/env bash
# One prompt, served with DFLASH and without, by real SGLang servers of the tiny pair that this package ships.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
cd "$REPO"

PAIR="$REPO/sglang_dflash/tiny_pair"
WORK="$(mktemp -d)"
SERVER=
CLIENT=

stop_server() {
    [ -n "$SERVER" ] || return 0
    # Its process group: the HTTP server, the scheduler and the detokenizer.
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

flags=(--model-path "$PAIR/target" --host 127.0.0.1 --max-running-requests 8 --max-total-tokens 20000)
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())')" = False ]; then
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    flags+=(--device cpu --dtype float32 --attention-backend torch_native)
fi

serve_and_ask() { # name, flags of launch_server
    local name=$1 port log="$WORK/$1.log"
    shift
    port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    printf '\n[%s] python -m sglang.launch_server %s\n' "$name" "${*:-(no speculation)}"
    # A session of its own, so that all of it can be stopped.
    setsid "$PYTHON" -m sglang.launch_server "${flags[@]}" --port "$port" "$@" >"$log" 2>&1 &
    SERVER=$!
    disown "$SERVER" # or bash would report its end
    # In the background, as bash acts on a signal while it waits, not while it runs a command.
    "$PYTHON" scripts/demo.py ask --name "$name" --url "http://127.0.0.1:$port" --pid "$SERVER" \
        --result "$WORK/$name.json" &
    CLIENT=$!
    if ! wait "$CLIENT"; then
        printf '\nThe server said last:\n' >&2
        tail -n 20 "$log" >&2
        exit 1
    fi
    CLIENT=
    stop_server
}

serve_and_ask dflash --speculative-algorithm DFLASH --speculative-draft-model-path "$PAIR/drafter"
serve_and_ask plain
"$PYTHON" scripts/demo.py compare "$WORK/dflash.json" "$WORK/plain.json"
