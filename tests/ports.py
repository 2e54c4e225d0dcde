"""Ports of this machine for programs that need a port number before they listen."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_WORKERS = 64  # processes of pytest


def free_port(host: str = "127.0.0.1") -> int:
    """A free port of an address that the kernel does not assign to connections.

    The kernel assigns ports from 32768 on, so one of those could be taken before the program binds it.
    Clusters of tests use those from 26443 on. Each process of pytest has ports of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.sample(range(10_000 + worker % _WORKERS, 26_000, _WORKERS), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind((host, port))
            return port
    raise AssertionError("100 ports are in use")


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: nobody listens there, and no other program can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
