"""An Engine in another process, because SGLang keeps state per process. It answers calls until it is stopped.

usage: engine_process.py ARGUMENTS SOCKET
    ARGUMENTS: JSON file with the arguments of `sglang.Engine`.
    SOCKET: name of a Unix socket, which exists once the Engine serves.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

START_SECONDS, CALL_SECONDS = 400, 300


class EngineProcess:
    """An Engine that another process runs.

    Attributes:
        folder: has its files, among them `stderr`.
    """

    def __init__(self, arguments: dict, env: dict[str, str] | None = None, folder: Path | None = None) -> None:
        """Begin to start an Engine. The first call waits until it serves.

        Args:
            arguments: of `sglang.Engine`.
            env: environment variables.
            folder: an empty one; None for a temporary one.
        """
        # Imported here because the program, which is this file too, does not need them.
        from bench.ports import claim_port
        from support import processes

        self.folder = folder or Path(tempfile.mkdtemp(prefix="engine-"))
        # A socket's name has at most 107 characters, and folders of tests may have longer ones.
        self._address = Path(tempfile.mkdtemp(prefix="engine-")) / "socket"
        written = self.folder / "arguments.json"
        # SGLang's own choice of a free port is taken by another Engine before this one listens.
        port, self._port_claim = claim_port()
        written.write_text(json.dumps({"nccl_port": port} | arguments))
        self._stderr = self.folder / "stderr"
        program = [__file__, str(written), str(self._address)]
        self._process = processes.start(program, env or {}, self.folder / "stdout", self._stderr)
        self._connection = None

    def ask(self, calls: list[dict], timeout: float = CALL_SECONDS) -> tuple[list, dict | None]:
        """Make calls one after another.

        Args:
            calls: arguments of `Engine.generate` with a list of prompts. "flush": true empties the radix cache first.
                "abort" lists the prompts to abort once a part of their answer is there. "method" names another method
                of the Engine.
            timeout: of all calls together, in seconds.

        Returns:
            For each call a list of answers, each `{"output_ids", "meta_info"}`; of another method, what it returns. And
            DFLASH's part of `/server_info`.
        """
        if self._connection is None:
            self._connection = self._connect()
        self._connection.send(calls)
        assert self._connection.poll(timeout), f"no answer after {timeout} s\n{self.log_tail()}"
        try:
            return self._connection.recv()
        except EOFError:
            raise AssertionError(f"the Engine has ended\n{self.log_tail()}") from None

    def _connect(self):
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return Client(str(self._address))
            except (FileNotFoundError, ConnectionRefusedError):
                assert self._process.is_running(), f"the Engine did not start\n{self.log_tail()}"
                assert time.monotonic() < deadline, f"the Engine does not serve\n{self.log_tail()}"
                time.sleep(0.1)

    def log_tail(self) -> str:
        return self._stderr.read_text(errors="replace")[-4000:]

    def log(self) -> str:
        return self._stderr.read_text(errors="replace")

    def stop(self) -> None:
        """End the Engine and all processes that it has started."""
        if self._connection is not None:
            self._connection.close()
        self._process.end()
        self._port_claim.close()
        shutil.rmtree(self._address.parent)


def run(
    folder: Path, engine: dict, calls: list[dict], env: dict[str, str] | None = None, timeout: float = 580
) -> tuple[list, dict | None]:
    """Start an Engine, make calls as `EngineProcess.ask` does, stop the Engine, and return what the calls return.

    Args:
        folder: for the Engine's files. It gets a new folder in it.
        engine, env: see :class:`EngineProcess`.
    """
    process = EngineProcess(engine, env, Path(tempfile.mkdtemp(dir=folder)))
    try:
        return process.ask(calls, timeout)
    finally:
        process.stop()


async def generate_and_abort(engine, aborted: list[int], input_ids: list, sampling_params: list[dict]) -> list[dict]:
    """Return the last chunk of every answer. Requests in `aborted` are aborted after three chunks."""

    async def answer(i: int) -> dict:
        rid = f"request-{i}"
        stream = await engine.async_generate(
            input_ids=input_ids[i], sampling_params=sampling_params[i], rid=rid, stream=True
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 3 and i in aborted:
                engine.tokenizer_manager.abort_request(rid=rid)
        return chunks[-1]

    return await asyncio.gather(*(answer(i) for i in range(len(input_ids))))


def make_call(engine, call: dict):
    """Return what one call returns; see `EngineProcess.ask`."""
    # A call that is asked for twice arrives as one object.
    call = dict(call)
    aborted, method = call.pop("abort", None), call.pop("method", "generate")
    if call.pop("flush", False):
        # The last cycle, which was launched ahead, may still run; `Engine.flush_cache` does not wait for it.
        flushed = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60))
        assert flushed.success, flushed
    if method != "generate":
        return getattr(engine, method)(**call)
    if aborted is None:
        answers = engine.generate(**call)
    else:
        answers = engine.loop.run_until_complete(generate_and_abort(engine, aborted, **call))
    return [{"output_ids": answer["output_ids"], "meta_info": answer["meta_info"]} for answer in answers]


def main(arguments: str, address: str) -> None:
    # Imported here because the process of the tests imports this module and must not use the GPU.
    import sglang

    engine = sglang.Engine(**{"log_level": "warning"} | json.loads(Path(arguments).read_text()))
    with Listener(address) as listener, listener.accept() as connection:
        while True:
            try:
                calls = connection.recv()
            except EOFError:
                break
            results = [make_call(engine, call) for call in calls]
            described = engine.get_server_info()["internal_states"][0].get("sglang_dflash")
            connection.send((results, described))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
