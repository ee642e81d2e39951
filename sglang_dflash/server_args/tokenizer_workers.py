"""`--tokenizer-worker-num`: uvicorn's worker processes import an application that loads this package's plugin."""

from __future__ import annotations

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import ConfigError

HTTP_APP = "sglang_dflash.requests.http_app:app"


def choose_http_app(server_args: ServerArgs) -> None:
    """Set `SGLANG_HTTP_SERVER_APP_PATH` for a server with several tokenizer workers.

    Raises:
        ConfigError: the user has set it to another application, which would not check requests.
    """
    num_workers = resolving_view(server_args).tokenizer_worker_num
    if num_workers == 1:
        return
    variable = envs.SGLANG_HTTP_SERVER_APP_PATH
    if variable.is_set() and variable.get() != HTTP_APP:
        raise ConfigError(
            f"SGLANG_HTTP_SERVER_APP_PATH={variable.get()} is not supported with --speculative-algorithm DFLASH and "
            f"--tokenizer-worker-num {num_workers}: unset it."
        )
    variable.set(HTTP_APP)
