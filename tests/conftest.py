"""Without a GPU the tests run on SGLang's CPU engine, which has to be asked for before anything imports torch."""

import os
from pathlib import Path

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Two busy processes with more threads than cores slow each other down many times over.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# For the programs that tests start: model pairs, tests/support, this package and its CPU plugin are this checkout's.
_TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_TESTS.parent), str(_TESTS.parent / "cpu"), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_addoption(parser):
    parser.addoption(
        "--answers",
        metavar="FOLDER",
        help="where tests/gpu keep what servers without speculation answer, for other processes on the same GPU",
    )
