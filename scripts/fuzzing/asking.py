"""Requests of a case, sent to both servers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import requests
from serving import REQUEST_SECONDS, Pair, Server

from fuzzing.cases import Case

# Of one request.
Outcome = dict[str, Any]


def ask_rounds(pair: Pair, case: Case) -> list[list[tuple[dict, Outcome, Outcome]]]:
    """Return each round's requests with their outcomes, with DFLASH and without.

    Replaces prompts in `case` that continue an earlier answer by their tokens. So a request stays the same when others
    are left out.
    """
    asked: list[list[tuple[dict, Outcome, Outcome]]] = []
    for row in case.rounds:
        for request in row:
            _resolve_prompt(request, asked)
        with ThreadPoolExecutor(1) as threads:
            plain = threads.submit(_ask_plain, pair.plain, row, case.is_seeded)
            dflash = _ask_concurrently(pair.dflash, row)
            asked.append(list(zip(row, dflash, plain.result(), strict=True)))
    return asked


def ask(server: Server, request: dict) -> Outcome:
    """Send one request and read its answer.

    Returns:
        `status`: HTTP status, or what went wrong. `answer`: the body. For a stream of `/generate` it is the last chunk,
        for other streams all chunks joined. `chunks`: the chunks of a stream of `/generate`.
    """
    content = request["raw"].encode("latin-1") if "raw" in request else json.dumps(request["body"]).encode()
    is_stream = request["kind"] in ("stream", "hang up", "abort")
    try:
        with requests.Session() as http:
            http.trust_env = False
            response = http.post(
                f"{server.url}{request['path']}",
                data=content,
                headers={"Content-Type": "application/json"},
                stream=is_stream,
                timeout=REQUEST_SECONDS,
            )
            with closing(response):
                if not is_stream or response.status_code != 200:
                    return {"status": response.status_code, "answer": _json(response)}
                return {"status": 200} | _read_stream(server, response, request)
    except requests.RequestException as error:
        return {"status": f"no answer: {type(error).__name__}", "answer": None}


def _json(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _read_stream(server: Server, response: requests.Response, request: dict) -> Outcome:
    chunks: list[dict] = []
    most = request.get("chunks") if request["kind"] in ("hang up", "abort") else None
    lines = response.iter_lines(chunk_size=None) if most != 0 else ()
    for line in lines:
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            chunks.append(json.loads(line.removeprefix(b"data: ")))
            if len(chunks) == most and request["kind"] == "hang up":
                break
            if len(chunks) == most:
                server.post("/abort_request", {"rid": request["body"]["rid"]})
    if request["path"] == "/generate":
        return {"answer": chunks[-1] if chunks else None, "chunks": chunks}
    return {"answer": _join(chunks)}


def _join(chunks: list[dict]) -> dict:
    """Join the chunks of an OpenAI stream: texts, log probabilities and finish reason of each answer."""
    choices: dict[int, dict] = {}
    joined: dict[str, Any] = {"choices": choices, "usage": None}
    for chunk in chunks:
        if "error" in chunk:
            return chunk
        joined["usage"] = chunk.get("usage") or joined["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"finish_reason": None, "logprobs": {}})
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            for name, text in (part.get("delta") or {"text": part.get("text")}).items():
                if isinstance(text, str) and name != "role":
                    choice[name] = choice.get(name, "") + text
            for name, values in (part.get("logprobs") or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values or [])
    joined["choices"] = [choices[index] for index in sorted(choices)]
    return joined


def _ask_concurrently(server: Server, row: list[dict]) -> list[Outcome]:
    with ThreadPoolExecutor(max(1, len(row))) as threads:
        return list(threads.map(lambda request: ask(server, request), row))


def _ask_plain(server: Server, row: list[dict], is_seeded: bool) -> list[Outcome]:
    """Ask the server without speculation.

    Hostile bodies are left out, as SGLang may end with them. No request is left or aborted. A seed draws other tokens
    if requests with other filters are in its batch, so seeded requests are asked one by one.
    """
    row = [request | {"kind": "stream"} if request["kind"] in ("hang up", "abort") else request for request in row]
    alone = [is_seeded and "raw" not in request and _is_sampled(request["body"]) for request in row]
    together = [request for request, is_alone in zip(row, alone, strict=True) if not is_alone]
    shared = iter(_ask_concurrently(server, [each for each in together if each["kind"] != "hostile"]))
    outcomes = []
    for request, is_alone in zip(row, alone, strict=True):
        if request["kind"] == "hostile":
            outcomes.append({"status": None, "answer": None})
        else:
            outcomes.append(ask(server, request) if is_alone else next(shared))
    return outcomes


def _is_sampled(body: dict) -> bool:
    params = body.get("sampling_params")
    return isinstance(params, dict) and params.get("temperature") != 0


def _resolve_prompt(request: dict, asked: list[list[tuple[dict, Outcome, Outcome]]]) -> None:
    after = request.pop("after", None)
    most = request.pop("most_tokens", None)
    if most is None:
        return
    body = request["body"]
    ids = body["input_ids"]
    if after is not None:
        i, j, num_tokens = after
        earlier, _, plain = asked[i][j]
        ids = _ids(earlier["body"]["input_ids"]) + _output_ids(plain["answer"])[:num_tokens] + ids
    is_batch = isinstance(ids[0], list)
    body["input_ids"] = [prompt[:most] for prompt in ids] if is_batch else ids[:most]


def _ids(prompt: list) -> list[int]:
    return prompt[0] if isinstance(prompt[0], list) else prompt


def _output_ids(answer: Any) -> list[int]:
    first = answer[0] if isinstance(answer, list) else answer
    return first.get("output_ids") or [] if isinstance(first, dict) else []
