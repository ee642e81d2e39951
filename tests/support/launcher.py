"""Python programs that have imported SGLang before they begin: a process imports it once, and forks each of them.

Most of a server's start is that each of its processes imports SGLang. Here its main process is forked from this one,
with every module imported and nothing run, and its scheduler and detokenizer from the main process, where SGLang would
spawn them: with the plugins that it has loaded.

usage: launcher.py, with a JSON value per line on stdin. An object starts a program: `arguments` of the interpreter
(`-m MODULE ...`, `-c CODE` or `FILE ...`), and the files that take its `stdout` and `stderr`; the answer is its process
id, and it leads a session. A process id waits for a program to end; the answer is its exit status. Null ends the
launcher and leaves its programs alone; the end of stdin ends them too, as whoever asked for them has been killed.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress

# Between them, they import all that a server's processes do.
MODULES = [
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
]


def fork_programs() -> dict:
    """Answer every line; returns in the programs, each with its own."""
    programs = set()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request is None:
            sys.exit()
        if isinstance(request, int):
            programs.remove(request)
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                return request
            programs.add(answer)
        print(answer, flush=True)
    for program in programs:
        # Most have ended.
        with suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
    sys.exit()


def redirect(stdout: str, stderr: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    streams = [nothing, *(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (stdout, stderr))]
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)


def begin(program: str, *arguments: str) -> None:
    # SGLang sets "spawn".
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force=False: None
    sys.argv = [program, *arguments]
    if program == "-c":
        code = sys.argv.pop(1)
        exec(code, {"__name__": "__main__"})
    elif program == "-m":
        module = sys.argv.pop(1)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        # Where an interpreter looks first.
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    # Where an interpreter looks first for a module that it is given.
    sys.path[0] = os.getcwd()
    for module in MODULES:
        importlib.import_module(module)
    request = fork_programs()
    os.setsid()
    redirect(request["stdout"], request["stderr"])
    begin(*request["arguments"])
