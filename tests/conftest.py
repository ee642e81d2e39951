"""Options of all tests.

Without a GPU they run on SGLang's CPU engine, which must be chosen before torch is imported.
"""

import os
from pathlib import Path

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # With more threads than cores, two busy processes slow each other down many times.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# For the programs that tests start: they use the model pairs, tests/support, cpu/ and the package of this checkout.
_TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_TESTS.parent), str(_TESTS.parent / "cpu"), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_addoption(parser):
    options = parser.getgroup("tests/gpu")
    options.addoption(
        "--answers",
        metavar="FOLDER",
        help="where tests/gpu keep what engines without speculation answer, for other processes on the same GPU",
    )
    options.addoption("--list-groups", metavar="FILE", help="write the groups of tests/gpu and their tests as JSON")
    options.addoption(
        "--worker",
        metavar="FD",
        type=int,
        help="run groups of tests/gpu that a pipe names; see scripts/test_gpu.py",
    )
    options.addoption(
        "--table", metavar="FILE", help="append results of tests/gpu to a table, and leave out tests that it has"
    )
    options.addoption(
        "--rehearse",
        action="store_true",
        help="without a GPU, run those tests of tests/gpu on SGLang's CPU engine that can: errors of the tests show",
    )
