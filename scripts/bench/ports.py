"""Ports for servers and engines, which listen only after their imports, while other processes start too."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

# Below the range that Linux gives to connections.
_ports = deque(range(10000, 32000, 500))
random.shuffle(_ports)


def claim_port() -> tuple[int, IO]:
    """Return a port for a server that is about to start, and a lock file. The next port is free too.

    Until the file is closed, no other caller gets the port from this function. The port claimed longest ago is
    tried first, because servers with a recent one may not listen yet.

    Raises:
        RuntimeError: no port is free.
    """
    for _ in range(len(_ports)):
        _ports.rotate()
        # Another thread may rotate them again. The lock keeps two threads from one port.
        port = _ports[0]
        claim = open(Path(tempfile.gettempdir(), f"sglang-dflash-port-{port}"), "w")  # noqa: SIM115
        with socket.socket() as server, socket.socket() as distributed, suppress(OSError):
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for offset, listener in enumerate((server, distributed)):
                # As torch and uvicorn do: a port whose last connections closed less than a minute ago is free.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # On all addresses, as torch does.
                listener.bind(("", port + offset))
            return port, claim
        claim.close()
    raise RuntimeError("no free port")
