"""The HTTP server of the serve pod: a manifest, and the contents of requested files.

    GET /v1/manifest        the manifest's text, zlib-compressed
    POST /v1/files          {"manifest": SHA256, "entries": [[FIRST, LAST], ...]}: the bytes of
                            those files of the manifest, one after the other
    GET /readyz             200 once the workspace is complete

A worker checks both by their digests, requests only missing files, and repeats requests for files
that did not arrive. So the server has no state for a worker. It sends files to a few workers of a
large gang at a time, with the full bandwidth, while the others wait.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from torchrun_runtime.launch.connections import Port, listen, most_connections
from torchrun_runtime.serve.tokens import DeniedError, KeysUnavailableError, Verifier
from torchrun_runtime.serve.tree import NotThereError, ServedTree
from torchrun_runtime.sync.report import RareLog, log

STREAMS = 8
_UNAUTHENTICATED = 1024  # connections
# About the workers of a job, each of which has a connection while it waits for its turn.
_AUTHENTICATED = 4096
_IDLE_SECONDS = 30.0  # of a connection without an authenticated request
_GRACE_SECONDS = 2.0
_LARGEST_REQUEST = 8 << 20  # ranges of 200,000 single entries
# A client that reads nothing for this time is disconnected, and the next one is served.
_SEND_SECONDS = 60.0

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_our_error(record: logging.LogRecord) -> bool:
    """Whether a record is about an error of this program, and not about a request that is none."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


# Any pod of the cluster could fill the log with requests that are not HTTP.
_SERVER_LOG = logging.getLogger("torchrun-serve")
_SERVER_LOG.addFilter(_is_our_error)


class EntryRanges(msgspec.Struct, frozen=True):
    """Body of POST /v1/files: ascending ranges of the manifest's entries, ends included."""

    manifest: str
    entries: list[tuple[int, int]]


@asynccontextmanager
async def serving(
    tree: ServedTree, verifier: Verifier, host: str | None, port: int
) -> AsyncIterator[int]:
    """Serve on this address; yields the port in use. host: None for all addresses."""
    most = most_connections(_UNAUTHENTICATED, _AUTHENTICATED)
    guard = Port(most, _IDLE_SECONDS)
    runner = web.AppRunner(
        _application(tree, verifier, guard),
        access_log=None,
        logger=_SERVER_LOG,
        shutdown_timeout=_GRACE_SECONDS,
    )
    await runner.setup()
    try:
        handler = runner.server
        assert handler is not None
        listener = listen(host or "", port)
        guard.open(listener, handler)
        try:
            yield int(listener.getsockname()[1])
        finally:
            guard.close()
    finally:
        await runner.cleanup()


def _application(tree: ServedTree, verifier: Verifier, port: Port) -> web.Application:
    """The HTTP application. `tree` is read in separate threads."""
    handlers = _Handlers(tree, verifier, port)
    app = web.Application(client_max_size=_LARGEST_REQUEST)
    app.add_routes(
        [
            web.get("/readyz", handlers.ready),
            web.get("/v1/manifest", handlers.guarded(handlers.manifest)),
            web.post("/v1/files", handlers.guarded(handlers.files)),
        ]
    )
    app.on_cleanup.append(handlers.close)
    return app


class _Handlers:
    def __init__(self, tree: ServedTree, verifier: Verifier, port: Port) -> None:
        self._tree = tree
        self._verifier = verifier
        self._port = port
        self._log_denied = RareLog()
        self._turns = asyncio.Semaphore(STREAMS)
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="files")

    async def close(self, _: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def guarded(self, handler: Handler) -> Handler:
        """The handler, restricted to workers of the job."""

        async def guard(request: web.Request) -> web.StreamResponse:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            try:
                await self._verifier.check(token.strip() if scheme == "Bearer" else "")
            except DeniedError as error:
                self._log_denied(
                    "refused", "warning", peer=request.remote or "", message=str(error)
                )
                return _refusal(401, "Denied", str(error))
            except KeysUnavailableError as error:
                return _refusal(
                    503, "NotReady", f"Cannot get the keys that verify tokens: {error}."
                )
            self._port.admit(request.transport)
            try:
                return await handler(request)
            finally:
                self._port.limit(request.transport)

        return guard

    async def ready(self, _: web.Request) -> web.StreamResponse:
        # In another thread than files: eight workers that wait for a manifest take all of those.
        if await asyncio.to_thread(self._tree.ready):
            return web.json_response({"ready": True})
        return _refusal(503, "NotReady", "The workspace is not ready yet.")

    async def manifest(self, _: web.Request) -> web.StreamResponse:
        revision = await self._in_thread(self._tree.newest)
        if revision is None:
            return _refusal(503, "NotReady", "The workspace is not ready yet.")
        return web.Response(body=revision.packed, content_type="application/zlib")

    async def files(self, request: web.Request) -> web.StreamResponse:
        try:
            ranges = msgspec.json.decode(await request.read(), type=EntryRanges)
        except msgspec.DecodeError as error:
            shape = '{"manifest": SHA256, "entries": [[FIRST, LAST], ...]}'
            return _refusal(400, "BadRequest", f"The body must be {shape}: {error}.")
        if not _ascending(ranges.entries):
            message = "The ranges of entries must be in ascending order and must not overlap."
            return _refusal(400, "BadRequest", message)
        try:
            selection = await self._in_thread(
                lambda: self._tree.select(ranges.manifest, ranges.entries)
            )
        except NotThereError as error:
            return _refusal(409, "WorkspaceChanged", str(error))
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        response.content_length = selection.size
        try:
            async with self._turns:
                await self._send(request, response, selection.blocks())
        except (OSError, TimeoutError) as error:
            # Too late for an error: the worker notices the wrong length and repeats the request.
            log("interrupted", "warning", peer=request.remote or "", cause=str(error))
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, blocks: Iterator[bytes]
    ) -> None:
        await response.prepare(request)
        while block := await self._in_thread(lambda: next(blocks, b"")):
            async with asyncio.timeout(_SEND_SECONDS):
                await response.write(block)
        await response.write_eof()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _ascending(ranges: list[tuple[int, int]]) -> bool:
    """Whether each entry is requested once: else a short request could return any amount."""
    return all(before[1] < after[0] for before, after in pairwise(ranges))


def _refusal(status: int, reason: str, message: str) -> web.Response:
    body = json.dumps({"reason": reason, "message": message})
    return web.Response(status=status, text=body, content_type="application/json")
