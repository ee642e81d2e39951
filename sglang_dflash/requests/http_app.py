"""SGLang's HTTP application for servers with several tokenizer workers (`--tokenizer-worker-num`).

uvicorn imports it in each worker process (`SGLANG_HTTP_SERVER_APP_PATH`). SGLang loads no plugins there, so requests
would pass unchecked.
"""

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402, F401

from sglang_dflash import hooks  # noqa: E402

hooks.verify()
