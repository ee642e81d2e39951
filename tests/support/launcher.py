"""Start Python programs with SGLang imported: one process imports it once and forks each program.

Importing SGLang in each process, and applying hooks to what every module has imported, are most of a server's start.
Here the main process of a server is forked from this process, which has imported every module and run nothing. The
scheduler and the detokenizer are forked from the main process, where SGLang would spawn them. They keep the plugins
that it has loaded.

On a GPU, importing SGLang uses CUDA's driver, and a process that has used it cannot fork processes that use it. There
this process imports only the libraries that SGLang needs. The main process of a server has a fork server, which it
forks before it imports SGLang. The scheduler and the detokenizer are forked from that, import SGLang and load plugins.

usage: launcher.py modules|libraries, with one JSON value per line on stdin:
    object: start a program. `arguments` are those of the interpreter (`-m MODULE ...`, `-c CODE` or `FILE ...`);
        `env` has environment variables of its own; `stdout` and `stderr` are files. The answer is its process id. The
        program leads a session.
    process id: wait for a program to end. The answer is its exit status.
    null: end the launcher and leave its programs running.
The end of stdin ends the programs too: the process that started them was killed.
"""

import ctypes
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import signal
import sys
import traceback
import types
from contextlib import suppress

# Together they import all modules that a server's processes import.
MODULES = [
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    # It imports every class of models.
    "sglang.srt.models.registry",
]
# They take most of the time of importing SGLang. None of them uses CUDA's driver.
LIBRARIES = [
    "aiohttp",
    "fastapi",
    "openai",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "transformers.activations",
    "triton",
    "uvicorn",
]
# What CUDA's driver returns before it is initialised.
NOT_INITIALIZED = 3


def import_modules() -> None:
    for module in MODULES:
        importlib.import_module(module)
    find_imported_at_once()


def import_libraries() -> None:
    # Torch asks NVML whether there is a GPU, and not the driver.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for library in LIBRARIES:
        importlib.import_module(library)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    if is_driver_initialized():
        sys.exit(f"launcher.py: importing {', '.join(LIBRARIES)} has initialised CUDA's driver")


def is_driver_initialized() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # A machine without a GPU.
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED


def fork_programs() -> dict:
    """Answer every line of stdin. In a forked program, return its request."""
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
        # Most have ended already.
        with suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
    sys.exit()


def find_imported_at_once() -> None:
    """Find what a hook must replace in a table of all modules' names, where SGLang would walk them for each hook.

    Modules that are imported later are added, and the program's own is walked.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    walked, places = set(), {}

    def walk_new():
        if len(walked) == len(sys.modules):
            return
        for key, module in list(sys.modules.items()):
            if key in walked:
                continue
            walked.add(key)
            if isinstance(module, types.ModuleType):
                for name, value in list(vars(module).items()):
                    if callable(value):
                        places.setdefault(id(value), []).append((module, name))

    def propagate(original, wrapped, source_module):
        walk_new()
        program = sys.modules["__main__"]
        found = [
            (module, name)
            for module, name in [*places.get(id(original), []), *((program, name) for name in vars(program))]
            if module is not source_module and vars(module).get(name) is original
        ]
        for module, name in found:
            setattr(module, name, wrapped)
        # Another hook may have any of these as its target.
        own = [(source_module, name) for name, value in list(vars(source_module).items()) if value is wrapped]
        places.setdefault(id(wrapped), []).extend([*found, *own])
        return len(found)

    walk_new()
    registry._propagate_patch = propagate


def set_environment(env: dict[str, str]) -> None:
    os.environ.update(env)
    # As the interpreter does when it starts.
    own = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = own


def redirect(stdout: str, stderr: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    streams = [nothing, *(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (stdout, stderr))]
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)


def run_fork_server() -> None:
    """Run the fork server of `multiprocessing` in a fork of this process, where Python would start an interpreter.

    Its processes have imported what this process has imported by now. They get the environment that their parent has
    when it starts them.
    """

    def fork_image(_executable: str, arguments: list[str], passed: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in passed:
                    # The one that listed them is closed already.
                    with suppress(OSError):
                        os.close(fd)
            status = 1
            try:
                # The code that a new interpreter would run.
                exec(arguments[-1], {})
            except SystemExit:
                # No process is left that could ask for another one.
                status = 0
            except BaseException:
                # As an interpreter would; whatever the server raises, this image must not go on as its parent.
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    get_preparation_data, prepare = multiprocessing.spawn.get_preparation_data, multiprocessing.spawn.prepare

    def get_with_environment(name: str) -> dict:
        return get_preparation_data(name) | {"environ": dict(os.environ)}

    def prepare_with_environment(data: dict) -> None:
        environ = data.pop("environ")
        os.environ.clear()
        os.environ.update(environ)
        prepare(data)

    multiprocessing.spawn.get_preparation_data = get_with_environment
    multiprocessing.spawn.prepare = prepare_with_environment
    multiprocessing.resource_tracker.ensure_running()
    spawn = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = fork_image
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = spawn


def begin(start_method: str, program: str, *arguments: str) -> None:
    # A library may have asked for the default one.
    multiprocessing.set_start_method(start_method, force=True)
    # SGLang sets "spawn" later, so setting it is disabled.
    multiprocessing.set_start_method = lambda method, force=False: None
    sys.argv = [program, *arguments]
    if program == "-c":
        code = sys.argv.pop(1)
        exec(code, {"__name__": "__main__"})
    elif program == "-m":
        module = sys.argv.pop(1)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        # The interpreter searches the program's folder first.
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    # The interpreter searches the working directory first for a module that it is given.
    sys.path[0] = os.getcwd()
    has_libraries = sys.argv[1] == "libraries"
    if has_libraries:
        import_libraries()
    else:
        import_modules()
    # Programs need not look for garbage in what is imported, nor copy its pages.
    gc.collect()
    gc.freeze()
    request = fork_programs()
    os.setsid()
    set_environment(request["env"])
    redirect(request["stdout"], request["stderr"])
    if has_libraries:
        run_fork_server()
    begin("forkserver" if has_libraries else "fork", *request["arguments"])
