"""The pod's HTTP face: one archive in, pieces and retries allowed.

Clients come through the API server's pod proxy, die in the middle, send twice, or send nothing for
minutes. So every body is written piece by piece as it comes, every read has a timeout, and no
request waits for another.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from torchrun_runtime.sync.errors import UploadError
from torchrun_runtime.sync.report import log
from torchrun_runtime.sync.settings import SHA256
from torchrun_runtime.sync.upload import Identity
from torchrun_runtime.sync.workflow import Workflow

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_PIECE = 1 << 20
_LARGEST_MANIFEST = 32 << 20  # compressed; of 200,000 files it has about 9 MB
_CONNECTIONS = 64
_DRAIN_SECONDS = 5.0


class Server(ThreadingHTTPServer):
    """Listens on all addresses, both families where there are both; at most 64 connections."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, workflow: Workflow, read_timeout: float) -> None:
        self.workflow = workflow
        self.read_timeout = read_timeout
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__((host, port), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = _listen(host, port)
        self.server_address = self.socket.getsockname()

    @property
    def port(self) -> int:
        """The port in use, also where 0 asked for any."""
        return int(self.socket.getsockname()[1])

    def process_request(self, request: object, client_address: object) -> None:
        """Serve the connection in a thread of its own, or close it where there are too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Give the slot back at the connection's end."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks is daily business: its upload is resumed."""


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 compiled in, but switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        """Bound every read and write of this connection."""
        self.request.settimeout(self.server.read_timeout)
        super().setup()

    def do_GET(self) -> None:
        """GET /v1/upload, GET /readyz."""
        path = self.path.partition("?")[0]
        if path == "/readyz":
            self._reply(200, {"ready": True})
        elif path == "/v1/upload":
            final = self.server.workflow.final
            self._reply(200, self.server.workflow.describe())
            if final:
                self.server.workflow.seen.set()
        else:
            self._reply(404, {"reason": "NotFound", "message": "there is /v1/upload and /readyz"})

    def do_PUT(self) -> None:
        """PUT /v1/manifest, and PUT /v1/upload: one range of the archive."""
        self._body_left = 0
        path = self.path.partition("?")[0]
        try:
            if path not in ("/v1/upload", "/v1/manifest"):
                message = "archives are PUT to /v1/upload, manifests to /v1/manifest"
                raise UploadError(404, "NotFound", message)
            self._body_left = self._content_length()
            if path == "/v1/manifest":
                self._take_manifest()
                return
            identity, start = self._identity_and_start()
            writer = self.server.workflow.begin(identity, start)
            offset = self._receive(writer, start)
            if self.server.workflow.finish(writer):
                log("upload complete", sha256=identity.sha256, bytes=offset)
                self._reply(202, {"state": "extracting"})
            else:
                self._reply(200, {"offset": offset})
        except UploadError as error:
            self._refuse(error)
        except (ConnectionError, TimeoutError) as error:
            self.close_connection = True
            offset = self.server.workflow.upload.offset
            log("upload interrupted", "warning", cause=str(error), offset=offset)
        except OSError as error:
            message = f"the workspace claim cannot be written: {error.strerror}"
            self._refuse(UploadError(500, "WorkspaceUnavailable", message))

    def _take_manifest(self) -> None:
        sha256 = self._sha256("X-Torchrun-Workspace")
        if self._body_left > _LARGEST_MANIFEST:
            message = f"a manifest may have {_LARGEST_MANIFEST} bytes, not {self._body_left}"
            raise UploadError(413, "ManifestTooLarge", message)
        body = b"".join(self._pieces())
        self.server.workflow.announce(sha256, body)
        log("announced", workspace=sha256, bytes=len(body))
        self._reply(202, {"state": "comparing"})

    def _sha256(self, header: str) -> str:
        sha256 = self.headers.get(header, "").strip().lower()
        if not SHA256.fullmatch(sha256):
            message = f"{header} must be a SHA-256, 64 hexadecimal digits"
            raise UploadError(400, "BadRequest", message)
        return sha256

    def _content_length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            self.close_connection = True
            raise UploadError(411, "LengthRequired", "send the body with a Content-Length")
        return int(text)

    def _identity_and_start(self) -> tuple[Identity, int]:
        sha256 = self._sha256("X-Torchrun-Sha256")
        given = self.headers.get("X-Torchrun-Workspace")
        workspace = "" if given is None else self._sha256("X-Torchrun-Workspace")
        match = _CONTENT_RANGE.fullmatch(self.headers.get("Content-Range", "").strip())
        first, last, total = (int(group) for group in match.groups()) if match else (0, -1, 0)
        if not first <= last < total:
            message = "Content-Range must be 'bytes FIRST-LAST/TOTAL', FIRST <= LAST < TOTAL"
            raise UploadError(400, "BadRequest", message)
        if self._body_left != last - first + 1:
            message = f"Content-Length must be the range's length, {last - first + 1}"
            raise UploadError(400, "BadRequest", message)
        return Identity(sha256, total, workspace), first

    def _receive(self, writer: object, offset: int) -> int:
        for piece in self._pieces():
            offset = self.server.workflow.upload.append(writer, piece)
        return offset

    def _pieces(self) -> Iterator[bytes]:
        """The body as it comes. Raises ConnectionError where it ends too early."""
        while self._body_left:
            piece = self.rfile.read1(min(_PIECE, self._body_left))
            if not piece:
                raise ConnectionError("the client closed the connection")
            self._body_left -= len(piece)
            yield piece

    def _refuse(self, error: UploadError) -> None:
        body: JsonObject = {"reason": error.reason, "message": error.message}
        if error.offset is not None:
            body["offset"] = error.offset
        if error.status != 409:
            log("upload refused", "warning", status=error.status, **body)
        self._reply(error.status, body)
        self._drain()

    def _drain(self) -> None:
        """Read on for a moment: closing on unread bytes resets the connection, answer and all."""
        end = time.monotonic() + _DRAIN_SECONDS
        self.connection.settimeout(_DRAIN_SECONDS)
        with suppress(OSError):
            while self._body_left and time.monotonic() < end:
                piece = self.rfile.read1(min(_PIECE, self._body_left))
                if not piece:
                    break
                self._body_left -= len(piece)
            self.connection.settimeout(self.server.read_timeout)
        self.close_connection = self.close_connection or self._body_left > 0

    def _reply(self, status: int, body: "JsonObject") -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses (bad syntax, unknown methods), in our form."""
        self.close_connection = True
        text = message or HTTPStatus(code).phrase
        with suppress(OSError):
            self._reply(code, {"reason": "BadRequest", "message": text})

    def version_string(self) -> str:
        """Server header without the interpreter's version."""
        return "torchrun-sync"

    def log_message(self, format: str, *args: object) -> None:
        """Uploads are logged as events; polls are not logged."""
