"""POST /v1/progress: a worker reports the progress of its training.

    POST /v1/progress   Authorization: Bearer <token of audience torchrun.ai/progress>
    {"step": 120, "totalSteps": 1000, "loss": 2.31, "samplesPerSecond": 450.0}

Node 0 also reports restarts of the ranks in the same pods: how many, and the last failed rounds;
with them, the networks that NCCL uses on the nodes.

    {"restartsInPlace": {"count": 1, "last": [{"round": 0, "node": 1, "reason": "Signaled", ...}]}}

Node 0 also reports the newest complete checkpoints, even while its pod ends after its attempt: its
ranks may have saved when they were asked to end.

    {"checkpoints": [{"step": 1200, "path": "/checkpoints/1200", "time": "2026-01-02T03:04:05Z"}]}

    204 accepted         400 not such JSON         401 no valid token
    403 the pod of the token is not a worker of the current attempt of a job, or not of node 0
    404 other path       408 slow body             413 body over 16 KiB
    429 too often        503 from a standby, or at the limits of tokens, then with Retry-After

The server has its own port, because pods of jobs may reach only this one. A standby refuses a
report and does not forward it: the next connection goes through the Service to any replica. Any pod
of a job may open connections, so their number and duration are limited (`connections`).
"""

import asyncio  # only for create_server, which aiohttp's handlers need
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Protocol

import anyio
import msgspec
import structlog
from aiohttp import web

from torchrun_api.contract.launch import PROGRESS_PATH
from torchrun_api.kinds.status import Progress
from torchrun_controller.cache.progress_reports import Key, ReportingWorker, Reports
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import ProgressReport
from torchrun_controller.serving.connections import SERVER_LOG, ConnectionLimit
from torchrun_controller.serving.progress.tokens import BusyError, PodIdentity, Tokens
from torchrun_controller.serving.server import listen

MAX_BODY = 16 * 1024
BODY_SECONDS = 5.0
MIN_INTERVAL = 1.0  # seconds between two reports of a job
WARNING_SECONDS = 60.0
NO_WORKER = "the pod of the token is not a worker of the current attempt of a TorchrunJob"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Workers(Protocol):
    """The part of the InformerFactory that is needed here."""

    def job_of(self, namespace: str, pod: str, uid: str) -> Key | None:
        """See `InformerFactory.job_of`."""

    def worker(self, namespace: str, pod: str, uid: str) -> ReportingWorker | None:
        """See `InformerFactory.worker`."""


class ReportRefused(Exception):  # noqa: N818  # a response, not an error
    """A refused report.

    `status` is the HTTP code, `retry_after` the Retry-After in seconds, 0 for none. The message is
    the body of the response.
    """

    def __init__(self, status: int, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ProgressServer:
    """The HTTP server of the reports, while `running`.

    `leads` returns whether this process may write. `accepted` is called with the key of the job of
    each accepted report.
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
        handler = web.Server(self._handle, access_log=None, logger=SERVER_LOG)
        limit = ConnectionLimit(handler)
        server = await asyncio.get_running_loop().create_server(limit.new_protocol, sock=listening)
        try:
            yield
        finally:
            server.close()
            limit.close()
            await handler.shutdown(1)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        try:
            await self._accept_report(request)
        except ReportRefused as refusal:
            self._metrics.progress_reports.labels(refusal.status).inc()
            response = web.Response(status=refusal.status, text=f"{refusal}\n")
            response.force_close()
            if refusal.retry_after:
                response.headers["Retry-After"] = str(refusal.retry_after)
            return response
        self._metrics.progress_reports.labels(204).inc()
        return web.Response(status=204)

    async def _accept_report(self, request: web.BaseRequest) -> None:
        if (request.method, request.path) != ("POST", PROGRESS_PATH):
            raise ReportRefused(404, f"only POST {PROGRESS_PATH}")
        if not self._leads():
            raise ReportRefused(503, "this replica is a standby; another one is the leader")
        authorization = request.headers.get("Authorization", "")
        sender = await self._sender(authorization, request.remote or "")
        body = _decode(await _read(request))
        # After the read of the body, because the job may be deleted meanwhile.
        worker = self._workers.worker(sender.namespace, sender.name, sender.uid)
        if worker is None or not (worker.is_current or body.checkpoints is not None):
            raise ReportRefused(403, NO_WORKER)
        if body.checkpoints is not None:
            if not worker.is_leader:
                raise ReportRefused(403, "only the worker of node 0 reports checkpoints")
            self._reports.put_checkpoints(worker.job, worker.job_uid, body.checkpoints)
        elif body.restarts_in_place is not None:
            if not worker.is_leader:
                raise ReportRefused(403, "only the worker of node 0 reports restarts")
            self._reports.put_restarts(worker.job, worker.child_uid, body.restarts_in_place)
        else:
            self._reports.put(worker.job, worker.child_uid, self._progress(body))
        self._accepted(worker.job)

    def _progress(self, body: ProgressReport) -> Progress:
        return Progress(
            step=body.step,
            total_steps=body.total_steps,
            loss=body.loss,
            samples_per_second=body.samples_per_second,
            time=self._now(),
        )

    async def _sender(self, authorization: str, source: str) -> PodIdentity:
        """Return the identity that the token proves. Raises ReportRefused.

        Until the token is verified, nothing is logged and no request is sent: anyone can forge its
        claims.
        """
        scheme, _, token = authorization.partition(" ")
        claims = self._tokens.claims(token) if scheme.lower() == "bearer" else None
        if claims is None:
            raise ReportRefused(
                401, "a bearer token with the audience torchrun.ai/progress is required"
            )
        job = self._workers.job_of(claims.pod.namespace, claims.pod.name, claims.pod.uid)
        if job is None:
            raise ReportRefused(403, NO_WORKER)
        if self._reports.age(job) < MIN_INTERVAL:
            raise ReportRefused(429, "at most one report per second is accepted", retry_after=1)
        try:
            identity = await self._tokens.pod_of(token, claims, source)
        except BusyError as error:
            self._warn(str(error))
            raise ReportRefused(503, str(error), retry_after=10) from error
        if identity is None:
            raise ReportRefused(401, "the API server rejects this token")
        return identity

    def _warn(self, error: str) -> None:
        """Log refused reports at most once a minute: unverified senders must not fill the log."""
        if self._clock() - self._warned_at >= WARNING_SECONDS:
            self._warned_at = self._clock()
            log.warning("progress reports are refused", error=error)


async def _read(request: web.BaseRequest) -> bytes:
    """Read a short body within the time limit. Raises ReportRefused."""
    body = b""
    try:
        with anyio.fail_after(BODY_SECONDS):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > MAX_BODY:
                    raise ReportRefused(413, f"longer than {MAX_BODY} bytes")
    except TimeoutError:
        raise ReportRefused(408, f"the body took longer than {BODY_SECONDS:.0f} s") from None
    return body


def _decode(data: bytes) -> ProgressReport:
    try:
        return msgspec.json.decode(data, type=ProgressReport)
    except (ValueError, RecursionError) as error:
        raise ReportRefused(400, f"not a report: {error}") from None
