#!/usr/bin/env bash
# Run tests/gpu, several groups of tests at a time on each GPU; see test_gpu.py.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/test_gpu.py" "$@"
