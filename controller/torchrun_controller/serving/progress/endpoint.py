"""POST /v1/progress: a worker reports the progress of its training.

    POST /v1/progress   Authorization: Bearer <token of audience torchrun.ai/progress>
    {"step": 120, "totalSteps": 1000, "loss": 2.31, "samplesPerSecond": 450.0}

    204 taken            400 not that JSON         401 no valid token
    403 the token's pod is no worker of a job's present attempt
    413 too long         429 too often             503 ask again: at once after a standby, and when
                                                   Retry-After says where it is too much at once

It has its own port, because pods of jobs may reach only this. A standby refuses and does not
forward: it does not know the leader's address, and the next connection goes through the Service to
any replica. Connections are limited in number and in time (`connection_limit`), because any pod of
a job may open them.
"""

import asyncio  # only for create_server, which aiohttp's handlers need
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Protocol

import anyio
import msgspec
import structlog
from aiohttp import web
from msgspec import Meta

from torchrun_api.meta import Wire
from torchrun_api.status import Progress
from torchrun_controller.cache.progress_reports import Key, Reports, Worker
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.progress.connection_limit import ConnectionLimit
from torchrun_controller.serving.progress.tokens import BusyError, PodIdentity, Tokens
from torchrun_controller.serving.server import listen

PATH = "/v1/progress"
LONGEST_BODY = 1024
BODY_SECONDS = 5.0
TOO_SOON = 1.0  # seconds between two reports of a job
WARNING_SECONDS = 60.0
NO_WORKER = "the token's pod is no worker of a TorchrunJob's present attempt"
Count = Annotated[int, Meta(ge=0, le=2**53)]  # what every reader of JSON holds

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Body(Wire, frozen=True, kw_only=True):
    """The body of a report; each field is optional."""

    step: Count | None = None
    total_steps: Count | None = None
    loss: float | None = None
    samples_per_second: Annotated[float, Meta(ge=0)] | None = None


class Workers(Protocol):
    """The part of the InformerFactory that is needed here."""

    def job_of(self, namespace: str, pod: str, uid: str) -> Key | None:
        """See `InformerFactory.job_of`."""

    def worker(self, namespace: str, pod: str, uid: str) -> Worker | None:
        """See `InformerFactory.worker`."""


class ReportRefused(Exception):  # noqa: N818  # an answer, not an error
    """status: HTTP code. The message helps to debug the sender."""

    def __init__(self, status: int, message: str, wait: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.wait = wait


class ProgressServer:
    """The HTTP server of the reports, while `running`.

    leads: whether this process may write. accepted: called with the job of each accepted report.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        leads: Callable[[], bool],
        tokens: Tokens,
        workers: Workers,
        reports: Reports,
        accepted: Callable[[Key], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self.port = port  # the real port while running, also if 0 was given
        self._address = address
        self._leads = leads
        self._tokens = tokens
        self._workers = workers
        self._reports = reports
        self._accepted = accepted
        self._metrics = metrics
        self._clock = clock
        self._warned_at = -math.inf
        self._now = now

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve. Raises OSError, which names address and port, if they are taken."""
        listening = listen(self._address, self.port)
        self.port = listening.getsockname()[1]
        handler = web.Server(self._answer, access_log=None)
        limit = ConnectionLimit(handler)
        server = await asyncio.get_running_loop().create_server(limit.new_protocol, sock=listening)
        try:
            yield
        finally:
            server.close()
            await handler.shutdown(1)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            await self._take(request)
        except ReportRefused as refused:
            self._metrics.progress_reports.labels(refused.status).inc()
            headers = {"Connection": "close"}
            if refused.wait:
                headers["Retry-After"] = str(refused.wait)
            return web.Response(status=refused.status, text=f"{refused}\n", headers=headers)
        self._metrics.progress_reports.labels(204).inc()
        return web.Response(status=204)

    async def _take(self, request: web.BaseRequest) -> None:
        if (request.method, request.path) != ("POST", PATH):
            raise ReportRefused(404, f"only POST {PATH}")
        if not self._leads():
            raise ReportRefused(503, "this replica stands by; another one leads")
        authorization = request.headers.get("Authorization", "")
        sender = await self._sender(authorization, request.remote or "")
        body = _decode(await _read(request))
        # After the body is read, because the job may be deleted in the meantime.
        worker = self._workers.worker(sender.namespace, sender.name, sender.uid)
        if worker is None:
            raise ReportRefused(403, NO_WORKER)
        progress = Progress(
            step=body.step,
            total_steps=body.total_steps,
            loss=body.loss,
            samples_per_second=body.samples_per_second,
            time=self._now(),
        )
        self._reports.put(worker.job, worker.child_uid, progress)
        self._accepted(worker.job)

    async def _sender(self, authorization: str, source: str) -> PodIdentity:
        """Return the pod that the token proves. Raises ReportRefused.

        Before the token is verified, nothing is logged and nothing costs more than a read of the
        cache: anybody can invent its claims.
        """
        scheme, _, token = authorization.partition(" ")
        claims = self._tokens.claims(token) if scheme.lower() == "bearer" else None
        if claims is None:
            raise ReportRefused(
                401, "a bearer token of the audience torchrun.ai/progress is needed"
            )
        job = self._workers.job_of(claims.pod.namespace, claims.pod.name, claims.pod.uid)
        if job is None:
            raise ReportRefused(403, NO_WORKER)
        if self._reports.age(job) < TOO_SOON:
            raise ReportRefused(429, "one report in a second is enough", wait=1)
        try:
            proved = await self._tokens.pod_of(token, claims, source)
        except BusyError as error:
            self._warn(str(error))
            raise ReportRefused(503, str(error), wait=10) from error
        if proved is None:
            raise ReportRefused(401, "the API server does not know this token")
        return proved

    def _warn(self, error: str) -> None:
        """Log refused reports once a minute: their senders are not known."""
        if self._clock() - self._warned_at >= WARNING_SECONDS:
            self._warned_at = self._clock()
            log.warning("reports of progress are refused", error=error)


async def _read(request: web.BaseRequest) -> bytes:
    """Read a short body within the time limit. Raises ReportRefused."""
    taken = b""
    try:
        with anyio.fail_after(BODY_SECONDS):
            while chunk := await request.content.readany():
                taken += chunk
                if len(taken) > LONGEST_BODY:
                    raise ReportRefused(413, f"longer than {LONGEST_BODY} bytes")
    except TimeoutError:
        raise ReportRefused(408, f"the body took longer than {BODY_SECONDS:.0f} s") from None
    return taken


def _decode(data: bytes) -> Body:
    try:
        return msgspec.json.decode(data, type=Body)
    except (ValueError, RecursionError) as error:
        raise ReportRefused(400, f"not a report: {error}") from None
