"""Answers of an Engine that runs in another process, because SGLang keeps state per process.

usage: engine_process.py REQUEST RESULT; both are JSON files, see `run`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path


def run(folder: Path, engine: dict, calls: list[dict], env: dict[str, str] | None = None) -> tuple[list, dict | None]:
    """Start an Engine in another process, send it requests, and return its answers.

    Args:
        folder: for the files that are exchanged.
        engine: arguments of `sglang.Engine`.
        calls: arguments of its `generate`, called one after another with a list of prompts. "abort" lists the prompts
        to
            abort once a part of their answer is there. "flush": true empties the radix cache first.
        env: environment variables.

    Returns:
        For each call a list of answers, each `{"output_ids", "meta_info"}`; and DFLASH's part of `/server_info`.
    """
    request, result = folder / "request.json", folder / "result.json"
    request.write_text(json.dumps({"engine": engine, "calls": calls}))
    # Imported here because the program, which is this file too, does not need it.
    from support import processes

    status, _, stderr = processes.run([__file__, str(request), str(result)], env or {}, folder, timeout=580)
    assert status == 0, stderr[-4000:]
    return json.loads(result.read_text())


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


def main(request: str, result: str) -> None:
    # Imported here because the process of the tests imports `run` and must not use the GPU.
    import sglang

    request = json.loads(Path(request).read_text())
    engine = sglang.Engine(log_level="warning", **request["engine"])
    answers = []
    for call in request["calls"]:
        aborted = call.pop("abort", None)
        if call.pop("flush", False):
            # The last cycle, which was launched ahead, may still run; `Engine.flush_cache` does not wait for it.
            flushed = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60))
            assert flushed.success, flushed
        if aborted is None:
            given = engine.generate(**call)
        else:
            given = engine.loop.run_until_complete(generate_and_abort(engine, aborted, **call))
        answers.append([{"output_ids": answer["output_ids"], "meta_info": answer["meta_info"]} for answer in given])
    described = engine.get_server_info()["internal_states"][0].get("sglang_dflash")
    engine.shutdown()
    Path(result).write_text(json.dumps([answers, described]))


if __name__ == "__main__":
    main(*sys.argv[1:])
