"""The control port of Ray's pods, and the program of the RayJob that keeps a RayCluster alive.

A pod connects, sends the call's secret, and sends DONE at its end. Anyone can reach the port: a
connection without the secret is not counted and has no effect. The server knows only the SHA-256 of
the secret, because more people can read the RayJob than the workspace.

A RayJob runs the text of this file in an image without this package: import nothing of it here.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import socket
import sys
import threading
import time
from contextlib import suppress

PORT = 6378  # in addition to those of Ray
HERE = b"here\n"  # the response to the secret
DONE = b"done\n"
_SHOW_SECONDS = 5.0  # time limit of a connection to send the secret
_LONGEST = 256  # bytes of the secret
_MOST_UNAUTHENTICATED = 64  # connections without the secret; one more closes the oldest
# Keepalive: a pod on a lost machine does not close its connection.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))


def digest(secret: str) -> str:
    """The SHA-256 of the secret, which the server compares."""
    return hashlib.sha256(secret.encode()).hexdigest()


def show(connection: socket.socket, secret: str, seconds: float) -> bool:
    """Send the secret to the server; whether the server accepts it. Raises OSError."""
    connection.settimeout(seconds)
    connection.sendall(secret.encode() + b"\n")
    accepted = connection.recv(len(HERE)) == HERE
    connection.settimeout(None)
    return accepted


class ControlPort:
    """A port on all addresses of the pod, and the connections that have sent the secret."""

    def __init__(self, port: int, digest: str) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        self._digest = digest
        self._lock = threading.Lock()
        self._unauthenticated: list[socket.socket] = []
        self._authenticated: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> ControlPort:
        return self

    def __exit__(self, *exc: object) -> None:
        _cut(self._server)  # shutdown wakes accept, close does not
        self._server.close()
        with self._lock:
            for connection in self._unauthenticated:
                _cut(connection)

    def accept(self, seconds: float) -> socket.socket | None:
        """The next connection that has sent the secret; None after the timeout."""
        try:
            return self._authenticated.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:  # closed
                    return
                time.sleep(0.1)  # for example without free descriptors
                continue
            with self._lock:
                self._unauthenticated.append(connection)
                if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
                    _cut(self._unauthenticated.pop(0))
            threading.Thread(target=self._ask, args=(connection,), daemon=True).start()

    def _ask(self, connection: socket.socket) -> None:
        is_authenticated = False
        with suppress(OSError):
            is_authenticated = self._knows(connection)
        with self._lock:
            if connection in self._unauthenticated:
                self._unauthenticated.remove(connection)
            else:
                is_authenticated = False
        if is_authenticated:
            with suppress(OSError):
                connection.settimeout(None)
                _watch(connection)
                connection.sendall(HERE)
                self._authenticated.put(connection)
                return
        connection.close()

    def _knows(self, connection: socket.socket) -> bool:
        until = time.monotonic() + _SHOW_SECONDS
        token = b""
        while not token.endswith(b"\n") and len(token) < _LONGEST:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            part = connection.recv(_LONGEST - len(token))
            if not part:
                return False
            token += part
        digest = hashlib.sha256(token[:-1]).hexdigest()
        return hmac.compare_digest(digest, self._digest)


def _cut(connection: socket.socket) -> None:
    """Shut down a connection on which another thread waits; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def serve_until_done(seconds: float, again: float, port: int, digest: str) -> int:
    """Wait until a pod has sent DONE; the exit code.

    0 after DONE; 1 after `seconds` without a pod, or `again` seconds after a pod was lost.
    """
    with ControlPort(port, digest) as control:
        while True:
            pod = control.accept(seconds)
            if pod is None:
                print(f"no pod has connected for {seconds:g} s", flush=True)
                return 1
            if _is_done(pod):
                return 0
            seconds = again


def _is_done(pod: socket.socket) -> bool:
    with pod:
        try:
            return pod.recv(len(DONE)) == DONE
        except OSError:
            return False


if __name__ == "__main__":
    sys.exit(
        serve_until_done(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    )
