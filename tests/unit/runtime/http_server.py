"""A small threaded HTTP server with injected faults."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore a client that disconnects."""


@contextmanager
def listening(
    address: tuple[str, int],
    answer: Answer,
    *,
    version: str = "HTTP/1.0",
    tls: ssl.SSLContext | None = None,
) -> Iterator[int]:
    """Handle every request with `answer` until the end of the block. Yields the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with _Server(address, Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(120)
