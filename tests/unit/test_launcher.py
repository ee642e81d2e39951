"""Programs that a launcher forks on a GPU: their processes are forked before anything uses CUDA's driver."""

import json

import pytest
from support import processes

# What a process of a program writes: variables, and whether it was forked with libraries and from its parent.
CHILD = """
import json, os, sys
names = ["SGLANG_OF_PROGRAM", "SET_LATER", "REMOVED"]
written = {name: os.environ.get(name) for name in names}
written |= {"libraries": "torch" in sys.modules, "sglang": "sglang" in sys.modules, "parent": os.getppid()}
open(sys.argv[1], "w").write(json.dumps(written))
"""
PROGRAM = f"""
import multiprocessing, os, sys
os.environ["SET_LATER"] = "later"
del os.environ["REMOVED"]
multiprocessing.set_start_method("spawn", force=True)
process = multiprocessing.Process(target=exec, args=({CHILD!r},))
process.start()
process.join()
print(os.getpid(), process.exitcode)
"""


def test_processes_of_a_program_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "IMPORTED", "libraries")
    env = {"SGLANG_OF_PROGRAM": "given", "REMOVED": "given"}
    status, stdout, stderr = processes.run(["-c", PROGRAM, str(tmp_path / "written")], env, tmp_path)
    assert status == 0, stderr
    program, exitcode = map(int, stdout.split())
    assert exitcode == 0, stderr
    written = json.loads((tmp_path / "written").read_text())
    assert written.pop("parent") != program
    assert written == {
        "SGLANG_OF_PROGRAM": "given",
        "SET_LATER": "later",
        "REMOVED": None,
        "libraries": True,
        "sglang": False,
    }


@pytest.mark.parametrize(
    ("imported", "name", "late"),
    [
        ("modules", "SGLANG_TEST_RETRACT", False),
        ("libraries", "SGLANG_TEST_RETRACT", True),
        ("libraries", "TRITON_F32_DEFAULT", False),
        ("libraries", "PYTHONPATH", True),
    ],
)
def test_variables_that_are_read_late(monkeypatch, imported, name, late):
    monkeypatch.setattr(processes, "IMPORTED", imported)
    assert processes.is_read_late(name) is late
