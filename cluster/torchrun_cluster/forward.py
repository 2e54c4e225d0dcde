"""Forward a local port of the host to an address inside a cluster's network namespace.

Run as a program: `forward.py PORT ANCHOR_PID ADDRESS ADDRESS_PORT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 16
CONNECT_TIMEOUT = 30.0


def enter_network_of(pid: int) -> None:
    """Move the calling thread into the network namespace of a process (os.setns is 3.12+)."""
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of {pid}")
    finally:
        os.close(handle)


def connect_inside(pid: int, address: tuple[str, int]) -> socket.socket:
    """Return a connection that is opened inside the network namespace of a process.

    Raises OSError if the address does not answer within CONNECT_TIMEOUT seconds.
    """
    connections: list[socket.socket] = []
    failed: list[OSError] = []

    def connect() -> None:
        try:
            enter_network_of(pid)
            connections.append(socket.create_connection(address, CONNECT_TIMEOUT))
        except OSError as error:
            failed.append(error)

    # Only this thread changes its namespace.
    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return connections[0]


def serve(port: int, pid: int, target: tuple[str, int]) -> None:
    """Accept on 127.0.0.1:PORT of the caller's namespace, for ever."""
    with socket.create_server(("127.0.0.1", port), backlog=512) as listener:
        # The listener stays in the host's namespace; connections are made from the cluster's.
        enter_network_of(pid)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve_one, args=(client, target), daemon=True).start()


def _serve_one(client: socket.socket, target: tuple[str, int]) -> None:
    with client:
        try:
            server = socket.create_connection(target, CONNECT_TIMEOUT)
        except OSError:
            return
        with server:
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    try:
        while count := source.recv_into(buffer):
            sink.sendall(view[:count])
    except OSError:
        # One side is gone: end the other one too.
        _shut(source)
    _shut(sink, socket.SHUT_WR)


def _shut(end: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), (sys.argv[3], int(sys.argv[4])))
