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
    parser.addoption(
        "--answers",
        metavar="FOLDER",
        help="where tests/gpu keep what servers without speculation answer, for other processes on the same GPU",
    )
