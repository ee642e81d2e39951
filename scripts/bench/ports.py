"""Ports for servers and engines that listen there only after their imports, whatever else starts in the meantime."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

# Below those that Linux gives to connections.
_ports = deque(range(10000, 32000, 500))
random.shuffle(_ports)


def claim_port() -> tuple[int, IO]:
    """A port for a server that is about to start, and a lock that keeps it from other processes that claim ports until
    it is closed; the next port is free too.

    The one given longest ago comes first: servers that have been given one may not listen there yet.
    """
    for _ in range(len(_ports)):
        _ports.rotate()
        claim = open(Path(tempfile.gettempdir(), f"sglang-dflash-port-{_ports[0]}"), "w")  # noqa: SIM115
        with socket.socket() as server, socket.socket() as distributed, suppress(OSError):
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            server.bind(("127.0.0.1", _ports[0]))
            distributed.bind(("127.0.0.1", _ports[0] + 1))
            return _ports[0], claim
        claim.close()
    raise RuntimeError("no free port")
