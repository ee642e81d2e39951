"""Ports that servers and engines of benchmarks and tests claim."""

import fcntl
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench import ports

# Below the range that Linux gives to connections, and no multiple of 500, which others claim.
FIRST, SECOND = 9310, 9320


@pytest.fixture(autouse=True)
def two_ports(monkeypatch):
    monkeypatch.setattr(ports, "_ports", deque([FIRST, SECOND]))


def test_claimed_once():
    claims = [ports.claim_port() for _ in range(2)]
    try:
        assert {port for port, _ in claims} == {FIRST, SECOND}
        with pytest.raises(RuntimeError, match="no free port"):
            ports.claim_port()
    finally:
        for _, claim in claims:
            claim.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", ""])
@pytest.mark.parametrize("offset", [0, 1])
def test_used_on_any_address(address, offset):
    """Torch listens on all addresses, so a port in use on another one than 127.0.0.1 is not free either."""
    with socket.socket() as other:
        other.bind((address, SECOND + offset))
        other.listen()
        for _ in range(2):
            port, claim = ports.claim_port()
            claim.close()
            assert port == FIRST


@pytest.mark.parametrize("offset", [0, 1])
def test_free_after_its_last_connection(offset):
    """Linux keeps a connection that a server has closed for a minute. Many Engines would need all ports by then."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", SECOND + offset))
        server.listen()
        with socket.create_connection(("127.0.0.1", SECOND + offset)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    claims = [ports.claim_port() for _ in range(2)]
    for _, claim in claims:
        claim.close()
    assert {port for port, _ in claims} == {FIRST, SECOND}


def test_threads_get_different_ports(monkeypatch):
    lock = fcntl.flock

    def slow(file, operation):
        time.sleep(0.02)
        lock(file, operation)

    monkeypatch.setattr(ports, "_ports", deque(range(9100, 9200, 10)))
    monkeypatch.setattr(ports.fcntl, "flock", slow)
    with ThreadPoolExecutor(4) as threads:
        claims = [claim.result() for claim in [threads.submit(ports.claim_port) for _ in range(4)]]
    for _, claim in claims:
        claim.close()
    assert len({port for port, _ in claims}) == 4
