"""`--tokenizer-worker-num 2`: each worker process checks requests, and answers are those of one worker."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from serving import DEFAULT, Settings, assert_same_answers
from test_hostile_requests import FLAGS, REFUSED, SERVED, body, message, shown

NUM_CONNECTIONS = 16
# For the second worker to start.
START_SECONDS = 120
WORKERS = Settings(
    "tokenizer-workers",
    flags=(*FLAGS, ("tokenizer-worker-num", 2), ("tokenizer-metrics-allowed-custom-labels", ("team",))),
    dflash_flags=(("enable-metrics", True),),
    # uvicorn ends workers that take longer to start, and several processes import SGLang here.
    env=(("SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT", "120"),),
    plain=DEFAULT,
)
pytestmark = [
    pytest.mark.parametrize("settings", [WORKERS], indirect=True, ids=str),
    pytest.mark.cpu(reason="nothing of it depends on the device"),
]


class Connection:
    """A connection to a server, and the worker process that serves it."""

    def __init__(self, server) -> None:
        self._url = server._url
        self._http = requests.Session()
        self._http.trust_env = False
        with self._http.get(f"{self._url}/health", stream=True, timeout=120) as response:
            self._port = response.raw.connection.sock.getsockname()[1]
            response.content  # noqa: B018
        self.worker = next(
            process.pid
            for process in psutil.Process(server._process.pid).children(recursive=True)
            for connection in process.net_connections("tcp")
            if connection.raddr and connection.raddr.port == self._port
        )

    def post(self, content: dict) -> requests.Response:
        response = self._http.post(f"{self._url}/generate", json=content, timeout=120)
        assert response.raw.connection is None or response.raw.connection.sock.getsockname()[1] == self._port
        return response


@pytest.fixture
def connections(pair) -> dict[int, Connection]:
    """Return one connection to each worker. A server is ready when the first of them is."""
    found, deadline = {}, time.monotonic() + START_SECONDS
    while len(found) < 2 and time.monotonic() < deadline:
        for _ in range(NUM_CONNECTIONS):
            connection = Connection(pair.dflash)
            found.setdefault(connection.worker, connection)
        time.sleep(0.5)
    assert len(found) == 2
    return found


def test_every_worker_refuses(pair, connections):
    """What would end the server, get a 500 or pass unchecked without the plugin's checks."""
    for connection in connections.values():
        for name, bodies in REFUSED.items():
            for request in bodies:
                try:
                    response = connection.post(request)
                except requests.exceptions.InvalidJSONError:
                    # NaN, which this client does not write.
                    continue
                assert response.status_code == 400, f"{shown(request)}: {response.text}"
                assert name in message(response)
    pair.dflash.get("/health")


def test_every_worker_serves(pair, prompts, connections):
    good = [{"input_ids": prompt, "max_new_tokens": 40, "ignore_eos": True} for prompt in prompts[:12]]

    answers = pair.dflash.generate_concurrently(good)

    assert_same_answers(answers, pair.plain.generate_concurrently(good))
    assert all(answer["meta_info"]["spec_verify_ct"] < 39 for answer in answers)
    with ThreadPoolExecutor(2) as threads:
        for request in SERVED.values():
            responses = list(threads.map(lambda each, request=request: each.post(request), connections.values()))
            assert [response.status_code for response in responses] == [200, 200], shown(request)
    texts = {connection.post(body()).json()["text"] for connection in connections.values()}
    assert len(texts) == 1
