"""Requests of scripts/fuzz.py to a server that answers with a few chunks: streams, clients that leave, and aborts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import requests
from fuzzing.asking import ask

CHUNKS = 6


class Handler(BaseHTTPRequestHandler):
    """Server of streams, which end early after `/abort_request`."""

    protocol_version = "HTTP/1.1"
    aborted = threading.Event()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/abort_request":
            assert body == {"rid": "mine"}
            self.aborted.set()
            self.answer(b"{}")
        elif not body.get("stream"):
            self.answer(json.dumps({"output_ids": [1]}).encode())
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.stream(openai=self.path != "/generate")

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, openai):
        for i in range(1, CHUNKS + 1):
            # An abort comes while the stream waits for it.
            if i == 4 and self.aborted.wait(0.5):
                break
            choice = {"index": 0, "text": str(i), "logprobs": {"tokens": [i]}, "finish_reason": None}
            self.send({"choices": [choice]} if openai else {"output_ids": list(range(i))})
        if openai:
            self.send({"choices": [choice | {"text": "", "logprobs": None, "finish_reason": "length"}]})
            self.send({"choices": [], "usage": {"completion_tokens": CHUNKS}})
        self.send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def send(self, value):
        line = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Handler.aborted.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
        yield SimpleNamespace(url=url, post=lambda path, body: requests.post(url + path, json=body, timeout=10))
        http.shutdown()


def request(kind, path="/generate", **fields):
    return {"kind": kind, "path": path, "body": {"stream": kind != "whole", "rid": "mine"}} | fields


def test_whole(server):
    assert ask(server, request("whole")) == {"status": 200, "answer": {"output_ids": [1]}}


def test_stream(server):
    outcome = ask(server, request("stream"))
    assert len(outcome["chunks"]) == CHUNKS and outcome["answer"] == outcome["chunks"][-1]


@pytest.mark.parametrize("chunks", [0, 2])
def test_client_that_leaves(server, chunks):
    assert len(ask(server, request("hang up", chunks=chunks))["chunks"]) == chunks


def test_abort(server):
    assert len(ask(server, request("abort", chunks=2))["chunks"]) == 3


def test_openai_stream(server):
    answer = ask(server, request("stream", "/v1/completions"))["answer"]
    assert answer == {
        "choices": [{"finish_reason": "length", "logprobs": {"tokens": [1, 2, 3, 4, 5, 6]}, "text": "123456"}],
        "usage": {"completion_tokens": CHUNKS},
    }


def test_no_server():
    assert ask(SimpleNamespace(url="http://127.0.0.1:9"), request("whole"))["status"].startswith("no answer")
