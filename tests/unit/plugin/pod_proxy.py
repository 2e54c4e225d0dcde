"""The pod proxy of an API server with faults, in front of a real torchrun-sync."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
from aiohttp import web

from ports import free_port
from web_server import listening

PREFIX = "/api/v1/namespaces/ns/pods/job-sync-0:8080/proxy"


class SyncPod:
    """torchrun-sync as a process on a directory; it can be killed and started again."""

    def __init__(self, directory: Path, sha256: str = "", token_sha256: str = "") -> None:
        self.directory = directory
        self.directory.mkdir(exist_ok=True)
        self.termination = directory.parent / "termination-log"
        self.termination.touch()
        self.port = free_port()
        self._sha256 = sha256
        self._token_sha256 = token_sha256
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start it without waiting until it listens."""
        environment = {
            **os.environ,
            "TORCHRUN_SYNC_DIR": str(self.directory),
            "TORCHRUN_SYNC_HOST": "127.0.0.1",
            "TORCHRUN_SYNC_PORT": str(self.port),
            "TORCHRUN_SYNC_SHA256": self._sha256,
            "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256": self._token_sha256,
            "TORCHRUN_TERMINATION_LOG": str(self.termination),
        }
        command = [sys.executable, "-m", "torchrun_runtime.sync"]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        self.spawn()
        assert self._process is not None
        async with asyncio.timeout(120):
            while self._process.poll() is None:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.01)
                else:
                    writer.close()
                    await writer.wait_closed()
                    return

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def success(self) -> None:
        """Wait until it has succeeded, possibly after a restart."""
        while self._process is None or self._process.poll() != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class PodProxy:
    """Forwards requests to the pod. `trouble`: the share of requests with a random fault."""

    def __init__(self, pod: SyncPod, trouble: float, random: Random) -> None:
        self.pod = pod
        self.trouble = trouble
        self.random = random
        self.went_wrong: set[str] = set()
        self.kill_at: list[
            int
        ] = []  # the pod is killed after these bytes of a request, once for each

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Base URL of the server."""
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", PREFIX + "/v1/{what:upload|manifest}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=1)
        async with (
            listening(runner) as port,
            aiohttp.ClientSession(auto_decompress=False) as self._session,
        ):
            yield f"http://127.0.0.1:{port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        kinds = ["429", "503", "cut before", "cut within", "cut after"]
        kind = self.random.choice(kinds) if self.random.random() < self.trouble else ""
        if kind:
            self.went_wrong.add(kind)
        if kind in ("429", "503"):
            body = {"kind": "Status", "code": int(kind), "message": "bad day"}
            return web.json_response(body, status=int(kind))
        if kind == "cut before":
            return self._cut(request)
        at = self.random.randrange(1, 1 << 20) if kind == "cut within" else 1 << 60
        try:
            status, answer = await self._forward(request, at)
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
            return self._cut(request)
        if kind == "cut after":
            return self._cut(request)
        return web.Response(status=status, body=answer, content_type="application/json")

    async def _forward(self, request: web.Request, at: int) -> tuple[int, bytes]:
        async def body() -> AsyncIterator[bytes]:
            passed = 0
            async for piece in request.content.iter_any():
                passed += len(piece)
                if passed > at:
                    yield piece[: len(piece) - (passed - at)]
                    raise ConnectionError("cut")
                yield piece
                if self.kill_at and passed > self.kill_at[0]:
                    self.kill_at.pop(0)
                    self.pod.kill()
                    await self.pod.start()

        names = ("Content-Range", "Content-Length")
        headers = {
            name: value
            for name, value in request.headers.items()
            if name in names or name.startswith("X-Torchrun-")
        }
        url = f"http://127.0.0.1:{self.pod.port}/v1/{request.match_info['what']}"
        data = body() if request.method == "PUT" else None
        async with self._session.request(
            request.method, url, data=data, headers=headers
        ) as response:
            return response.status, await response.read()

    def _cut(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
