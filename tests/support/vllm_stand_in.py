"""Server that answers like vLLM's with DFlash: `python -m vllm.entrypoints.openai.api_server` runs this file's text.

Each cycle of a request commits one token and the accepted drafts that `--speculative-config` asks for.
"""

import argparse
import json
import math
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    model, accept_length, drafts, accepted = "", 1.0, 0, 0

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        metrics = (
            "# TYPE vllm:spec_decode_num_drafts_total counter\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {Handler.drafts}\n'
            "# TYPE vllm:spec_decode_num_accepted_tokens_total counter\n"
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {Handler.accepted}\n'
        )
        answers = {
            "/health": "",
            "/version": json.dumps({"version": "9.9"}),
            "/v1/models": json.dumps({"data": [{"id": Handler.model}]}),
            "/metrics": metrics,
        }
        self.answer(200 if self.path in answers else 404, answers.get(self.path, "{}"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset_prefix_cache":
            self.answer(200 if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" else 404, "")
            return
        request = json.loads(body)
        assert self.path == "/v1/completions" and request["ignore_eos"] and request["model"] == Handler.model
        self.send_response(200)
        self.end_headers()
        left, tokens = request["max_tokens"], round(Handler.accept_length)
        for _ in range(math.ceil(left / tokens)):
            Handler.drafts += 1
            Handler.accepted += tokens - 1
            chunk = {"choices": [{"text": " w1" * min(tokens, left)}]}
            left -= tokens
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("host", "port", "model", "speculative-config", "load-format"):
        parser.add_argument(f"--{flag}", required=True)
    args = parser.parse_args()
    speculative = json.loads(args.speculative_config)
    assert speculative["method"] == "dflash" and speculative["num_speculative_tokens"] == 15
    Handler.model, Handler.accept_length = args.model, speculative["synthetic_acceptance_length"]
    ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()
