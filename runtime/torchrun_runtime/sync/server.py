"""The HTTP server of the sync pod: receives one archive, in pieces and with retries.

Clients use the pod proxy of the API server. They may disconnect, send twice, or send nothing for
minutes. So each piece of a body is written as it arrives, every read has a timeout, and no request
waits for another. Any pod can connect without the proxy; see `connections`.

A client must know a secret of the job. The controller copies annotations of the job, which only
users who may edit the job can set:

- The SHA-256 of a token. A client that sends the token may upload any workspace.
- The SHA-256 of the only accepted workspace. A client that sends it may upload that one. It is in
  no response and no log line, so only users who may read the job or have the files know it.

Without either annotation no upload is accepted.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from torchrun_runtime.launch.connections import Port, listen, most_connections
from torchrun_runtime.sync.errors import UploadError
from torchrun_runtime.sync.report import RareLog, log
from torchrun_runtime.sync.settings import SHA256
from torchrun_runtime.sync.upload import Identity
from torchrun_runtime.sync.workflow import Workflow

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_ARCHIVE, _WORKSPACE = "X-Torchrun-Sha256", "X-Torchrun-Workspace"
_LARGEST_MANIFEST = 32 << 20  # compressed; about 9 MB for 200,000 files
_BUFFER = 1 << 18
_UNAUTHENTICATED = 1024  # connections
_AUTHENTICATED = 64
_GRACE_SECONDS = 1.0  # for unfinished responses at the end
# The statuses of refusals that need no authorization.
_UNPROVEN = (400, 403, 404, 405, 411)

# aiohttp would log the data of clients. Errors of the server itself are logged with `report`.
_NO_LOG = logging.Logger("torchrun-sync", level=logging.CRITICAL + 1)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN_HEADER = "X-Torchrun-Upload-Token"  # noqa: S105  # the name of a header

_HOW = (
    "Run: kubectl torchrun sync JOB, or first: kubectl annotate tj JOB"
    " torchrun.ai/workspace-sha256=SHA256 --overwrite"
)


@dataclass(frozen=True)
class Authorization:
    """token_sha256: of the upload token. required_digest: of the workspace. "" for none."""

    token_sha256: str
    required_digest: str

    def check(self, token: str, *digests: str) -> None:
        """Raises UploadError (403) without the right token or the required digest."""
        token_sha256 = hashlib.sha256(token.encode(errors="replace")).hexdigest()
        if token and self.token_sha256 and hmac.compare_digest(token_sha256, self.token_sha256):
            return
        required = self.required_digest.encode()
        # As bytes: compare_digest refuses text that is not ASCII.
        shown = [digest.encode(errors="replace") for digest in digests]
        if required and any(hmac.compare_digest(digest, required) for digest in shown):
            return
        if not (self.token_sha256 or required):
            message = (
                f"The job has no annotation with a workspace digest or an upload token. {_HOW}"
            )
            raise UploadError(403, "UploadDenied", message)
        message = (
            "The request has neither the upload token nor the SHA-256 of the job's annotations."
            f" {_HOW}"
        )
        raise UploadError(403, "UploadDenied", message)


class UploadServer:
    """Serves in a separate thread, on all IPv4 and IPv6 addresses."""

    def __init__(
        self,
        host: str,
        port: int,
        workflow: Workflow,
        read_timeout: float,
        authorization: Authorization,
    ) -> None:
        most = most_connections(_UNAUTHENTICATED, _AUTHENTICATED)
        self._port = Port(most, read_timeout)
        self._handlers = _Handlers(workflow, read_timeout, authorization, self._port)
        self._listener = listen(host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port in use, also if 0 was requested."""
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handlers.answer)
        app.on_response_prepare.append(_set_server_header)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_NO_LOG,
            auto_decompress=False,
            read_bufsize=_BUFFER,
            shutdown_timeout=_GRACE_SECONDS,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._port.open(self._listener, server)

    async def _stop(self) -> None:
        self._port.close()
        if self._runner is not None:
            await self._runner.cleanup()
        # aiohttp leaves the task of a connection that ended within a refused body.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Handlers:
    """The handlers of requests. Code that reads or writes the PVC runs in threads."""

    def __init__(
        self,
        workflow: Workflow,
        read_timeout: float,
        authorization: Authorization,
        port: Port,
    ) -> None:
        self._workflow = workflow
        self._read_timeout = read_timeout
        self._authorization = authorization
        self._port = port
        self._log_unproven = RareLog()
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/readyz"): self._ready,
            ("GET", "/v1/upload"): self._describe,
            ("PUT", "/v1/upload"): self._take_archive,
            ("PUT", "/v1/manifest"): self._take_manifest,
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle any request."""
        try:
            return await self._route(request)(request)
        except UploadError as error:
            return self._refuse(error)
        except (ConnectionError, TimeoutError, ClientError, HttpProcessingError) as error:
            offset = self._workflow.upload.offset
            log("upload interrupted", "warning", cause=str(error) or repr(error), offset=offset)
            if request.transport is not None:
                # No response: the client or the proxy notices, and the client requests the offset.
                request.transport.close()
            return web.Response(status=408)
        except OSError as error:
            message = f"Cannot write to the workspace PVC: {error.strerror}."
            return self._refuse(UploadError(500, "WorkspaceNotWritable", message))
        except Exception as error:
            traceback.print_exc()
            message = f"The sync pod has a bug: {error!r}. See its log."
            return self._refuse(UploadError(500, "SyncFailed", message))
        finally:
            self._port.limit(request.transport)

    def _refuse(self, error: UploadError) -> web.Response:
        body: JsonObject = {"reason": error.reason, "message": error.message}
        if error.offset is not None:
            body["offset"] = error.offset
        if error.status != 409:
            write = self._log_unproven if error.status in _UNPROVEN else log
            write("upload refused", "warning", status=error.status, **body)
        return web.json_response(body, status=error.status)

    def _route(self, request: web.Request) -> Handler:
        if request.method == "GET" and request.can_read_body:
            raise UploadError(400, "BadRequest", "A GET request must not have a body.")
        route = self._routes.get((request.method, request.path))
        if route is not None:
            return route
        if request.method not in ("GET", "PUT"):
            raise UploadError(405, "BadRequest", "Only GET and PUT are supported.")
        message = "The paths are /v1/upload, /v1/manifest and /readyz."
        raise UploadError(404, "NotFound", message)

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"ready": True})

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        self._authorize(request)
        final = self._workflow.final
        body = await asyncio.to_thread(self._workflow.describe)
        response = web.json_response(body)
        if final:
            await response.prepare(request)
            await response.write_eof()
            self._workflow.result_read.set()
        return response

    async def _take_archive(self, request: web.Request) -> web.StreamResponse:
        length = _content_length(request)
        identity, start = _identity_and_start(request, length)
        self._authorize(request)
        writer = await asyncio.to_thread(self._workflow.begin, identity, start)
        offset = start
        async for piece in self._pieces(request, length):
            offset = await asyncio.to_thread(self._workflow.upload.append, writer, piece)
        if await asyncio.to_thread(self._workflow.finish, writer):
            log("upload complete", sha256=identity.sha256, bytes=offset)
            return web.json_response({"state": "extracting"}, status=202)
        return web.json_response({"offset": offset})

    async def _take_manifest(self, request: web.Request) -> web.StreamResponse:
        length = _content_length(request)
        sha256 = _sha256(request, _WORKSPACE)
        self._authorize(request)
        if length > _LARGEST_MANIFEST:
            message = f"The manifest has {length} bytes. The limit is {_LARGEST_MANIFEST}."
            raise UploadError(413, "BadRequest", message)
        body = b"".join([piece async for piece in self._pieces(request, length)])
        await asyncio.to_thread(self._workflow.announce, sha256, body)
        log("announced", workspace=sha256, bytes=length)
        return web.json_response({"state": "comparing"}, status=202)

    def _authorize(self, request: web.Request) -> None:
        """Raises UploadError (403). Called before any effect that another client could notice."""
        digests = [request.headers.get(header, "") for header in (_ARCHIVE, _WORKSPACE)]
        token = request.headers.get(TOKEN_HEADER, "")
        self._authorization.check(token, *(name.strip().lower() for name in digests))
        self._port.admit(request.transport)

    async def _pieces(self, request: web.Request, length: int) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises ConnectionError if it ends too early, TimeoutError."""
        remaining = length
        while remaining:
            async with asyncio.timeout(self._read_timeout):
                piece = await request.content.readany()
            if not piece:
                raise ConnectionError("the client closed the connection")
            remaining -= len(piece)
            yield piece


async def _set_server_header(_: web.Request, response: web.StreamResponse) -> None:
    """Set the Server header without versions."""
    response.headers["Server"] = "torchrun-sync"


def _content_length(request: web.Request) -> int:
    if request.content_length is None:
        raise UploadError(411, "BadRequest", "Send the body with a Content-Length header.")
    return request.content_length


def _sha256(request: web.Request, header: str) -> str:
    sha256 = request.headers.get(header, "").strip().lower()
    if not SHA256.fullmatch(sha256):
        message = f"{header} must be a SHA-256 of 64 hexadecimal digits."
        raise UploadError(400, "BadRequest", message)
    return sha256


def _identity_and_start(request: web.Request, length: int) -> tuple[Identity, int]:
    sha256 = _sha256(request, _ARCHIVE)
    workspace = _sha256(request, _WORKSPACE) if _WORKSPACE in request.headers else ""
    match = _CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", "").strip())
    first, last, total = (int(group) for group in match.groups()) if match else (0, -1, 0)
    if not first <= last < total:
        message = "Content-Range must be 'bytes FIRST-LAST/TOTAL' with FIRST <= LAST < TOTAL."
        raise UploadError(400, "BadRequest", message)
    if length != last - first + 1:
        message = f"Content-Length must be {last - first + 1}, the length of the range."
        raise UploadError(400, "BadRequest", message)
    return Identity(sha256, total, workspace), first
