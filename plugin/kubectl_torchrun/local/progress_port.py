"""The port on which launchers report progress and restarts, as the controller has one."""

import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from kubectl_torchrun.local.environment import HOST
from torchrun_api.contract.launch import PROGRESS_PATH
from torchrun_controller.reconcile.model.observed import ProgressReport

_MAX_BODY = 16 * 1024


class ProgressPort:
    """An HTTP server on a free port of the loopback interface, for launchers with a token.

    `received` is called in a thread of the server with the UID of the reporting pod.
    """

    def __init__(self, received: Callable[[str, ProgressReport], None]) -> None:
        self._received = received
        self._pods: dict[str, str] = {}  # UIDs by token
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://{HOST}:{self._server.server_address[1]}"

    def new_token(self, uid: str) -> str:
        """Return a token that proves that a report comes from this pod."""
        token = secrets.token_urlsafe(24)
        self._pods[token] = uid
        return token

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def accept(self, authorization: str, body: bytes) -> int:
        """Take a report; the HTTP status of the response."""
        uid = self._pods.get(authorization.removeprefix("Bearer "))
        if uid is None:
            return 401
        try:
            report = msgspec.json.decode(body, type=ProgressReport)
        except (ValueError, RecursionError):
            return 400
        self._received(uid, report)
        return 204

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        port = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_POST(self) -> None:
                size = self.headers.get("Content-Length", "")
                if self.path != PROGRESS_PATH or not size.isdecimal() or int(size) > _MAX_BODY:
                    status = 404
                else:
                    body = self.rfile.read(int(size))
                    status = port.accept(self.headers.get("Authorization", ""), body)
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Print nothing."""

        return Handler
