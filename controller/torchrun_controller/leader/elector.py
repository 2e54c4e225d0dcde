"""Leader election against the API server, for one process."""

import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Protocol, assert_never

import anyio
import msgspec
import structlog

from torchrun_api.json import JsonObject
from torchrun_controller.client import ApiError, Disconnected, Response
from torchrun_controller.leader.election import (
    LEASES,
    Durations,
    Election,
    Lease,
    LeaseLost,
    LeasePause,
    ReadLease,
    WriteLease,
)
from torchrun_controller.watch.codec import Codec, ServerError
from torchrun_controller.watch.events import Deleted, Faulted, Upserted
from torchrun_controller.watch.lines import LineSplitter, Overlong

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

MAX_FRAME = 2**20  # bytes of a watch line; a Lease has about 1,000
WATCH_SECONDS = 300

# Errors of a server that refuses, is not reached, is slow, or sends what does not decode.
REQUEST_ERRORS = (ApiError, Disconnected, TimeoutError, ValueError, RecursionError)


class NotLeader(Exception):  # noqa: N818 named for the state
    """This process does not hold the lease; the message says why."""


_CODEC = Codec(Lease)
_LEASE = msgspec.json.Decoder(Lease)


class LeaseClient(Protocol):
    """The part of the transport that a leader needs."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        """See `Transport.request`."""

    def stream(
        self, path: str, *, query: Mapping[str, str], total: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport.stream`."""


class Leadership(Protocol):
    """The interface to the rest of the process: a `Leader` or `NoElection`."""

    @property
    def elected(self) -> anyio.Event:
        """Set when the process becomes the leader; stays set."""

    @property
    def problem(self) -> str:
        """Why the last read or write of the lease failed, "" if it succeeded."""

    async def run(self) -> None:
        """Become the leader and remain it until cancelled. Raises NotLeader on loss."""

    def may_write(self) -> bool:
        """Whether a write may begin now."""

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""

    async def release(self) -> None:
        """Release the lease for a standby. Call it after the last write and the end of `run`."""


class NoElection:
    """Leadership without election: the administrator runs a single replica."""

    problem = ""

    def __init__(self) -> None:
        self.elected = anyio.Event()
        self.elected.set()

    async def run(self) -> None:
        """Wait until cancelled."""
        await anyio.sleep_forever()

    def may_write(self) -> bool:
        """Whether a write may begin now: always."""
        return True

    def check(self) -> None:
        """Never raises."""

    async def release(self) -> None:
        """Do nothing."""


class Leader:
    """Leadership by a Lease, for one `run`.

    `identity` must be unique to the process. `on_transition` is called when the holder changes.
    Needs the verbs create, get, patch and watch on leases.coordination.k8s.io.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        identity: str,
        namespace: str,
        name: str,
        durations: Durations,
        on_transition: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.elected = anyio.Event()
        self.problem = ""
        self._client = client
        self._namespace = namespace
        self._name = name
        self._election = Election(identity, durations)
        self._on_transition = on_transition
        self._clock = clock
        self._now = now
        self._jitter = jitter
        self._lease_change = anyio.Event()  # set by the watch
        self._holder = ""  # the last one that was logged
        self._has_written = False

    def may_write(self) -> bool:
        """Whether a write may begin now."""
        return self._clock() < self._election.writable_until()

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""
        if not self.may_write():
            raise NotLeader(f"lease {self._lease} is held by {self._election.holder or 'nobody'}")

    async def run(self) -> None:
        """Become the leader and remain it until cancelled. Raises NotLeader on loss."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_forever)
            reason = await self._run_election()
            tasks.cancel_scope.cancel()
        raise NotLeader(f"lease {self._lease} is lost: {reason}")

    async def release(self) -> None:
        """Release the lease for a standby. Call it after the last write and the end of `run`.

        Takes at most half the renew deadline. A failure is logged; a standby then waits for the
        expiry.
        """
        self._election.resign()
        if not self._has_written:
            return
        try:
            with anyio.fail_after(self._election.durations.renew_deadline / 2):
                await self._release_lease()
        except REQUEST_ERRORS as error:
            log.warning("lease not released", lease=self._lease, error=_describe_error(error))

    async def _run_election(self) -> str:
        """Carry out the decisions of the election until the lease is lost; return the reason."""
        while True:
            now = self._clock()
            self._log_holder()
            match self._election.decide(now):
                case LeasePause(seconds):
                    self._lease_change = anyio.Event()
                    with anyio.move_on_after(seconds):
                        await self._lease_change.wait()
                case ReadLease():
                    await self._attempt("get", self._read(), now)
                case WriteLease(version):
                    verb = "patch" if version else "create"
                    await self._attempt(verb, self._write(version, now), now)
                case LeaseLost(reason):
                    return reason
                case decision:
                    assert_never(decision)

    async def _attempt(
        self, verb: str, request: Coroutine[None, None, None], sent_at: float
    ) -> None:
        """Send one request. A failure is logged once; the next decision retries."""
        self._election.unsure(sent_at, self._jitter())
        deadline = self._election.writable_until()
        timeout = self._election.durations.renew_deadline / 2
        if deadline > sent_at:
            timeout = min(timeout, deadline - sent_at)
        try:
            with anyio.fail_after(timeout):
                await request
        except REQUEST_ERRORS as error:
            problem = f"cannot {verb} lease {self._lease}: {_describe_error(error)}"
            if problem != self.problem:
                log.warning("lease not renewed or read", problem=problem)
            self.problem = problem
        else:
            self.problem = ""

    async def _read(self) -> None:
        try:
            response = await self._client.request("GET", self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            self._election.absent(self._clock(), self._jitter())
            return
        self._election.read(response.read(_LEASE.decode), self._clock(), self._jitter())

    async def _write(self, version: str, sent_at: float) -> None:
        self._has_written = True
        try:
            lease = await self._send(version, self._election.record(self._now()))
        except ApiError as error:
            if error.status != 409:
                raise
            return  # another process has written the lease first; it is read next
        self._election.renewed(lease, sent_at, self._clock())
        if not self.elected.is_set():
            log.info("elected", lease=self._lease, identity=self._election.identity)
            self.elected.set()

    async def _release_lease(self) -> None:
        """Remove this process as the holder, even if the result of its last write is unknown."""
        while True:
            if not self._election.current:
                await self._read()
            if self._election.holder != self._election.identity or not self._election.version:
                return
            self._election.unsure(self._clock(), 0.0)
            try:
                await self._send(self._election.version, self._election.vacancy(self._now()))
            except ApiError as error:
                if error.status != 409:
                    raise
                continue
            log.info("lease released", lease=self._lease)
            return

    async def _send(self, version: str, spec: JsonObject) -> Lease:
        """Create the lease, or patch its spec: a PUT would drop fields that we do not read."""
        if version:
            body: JsonObject = {"metadata": {"resourceVersion": version}, "spec": spec}
            method, path, content = "PATCH", self._path, "application/merge-patch+json"
        else:
            meta: JsonObject = {"name": self._name, "namespace": self._namespace}
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": meta}
            body["spec"] = spec
            method, path, content = "POST", LEASES.path(self._namespace), "application/json"
        encoded = msgspec.json.encode(body)
        response = await self._client.request(method, path, body=encoded, content_type=content)
        return response.read(_LEASE.decode)

    async def _watch_forever(self) -> None:
        """Watch the lease; open a new watch after each end or failure, at the pace of polling.

        This is no informer: the role has no verb list on leases, and a watch without a
        resourceVersion begins with the present state of the one object.
        """
        problem = ""
        while True:
            started = self._clock()
            try:
                await self._watch()
                problem = ""
            except REQUEST_ERRORS as error:
                if problem != (problem := _describe_error(error)):
                    log.warning(
                        "cannot watch the lease, polling it", lease=self._lease, error=problem
                    )
            pace = self._election.pace(self._jitter())
            await anyio.sleep(max(0.0, started + pace - self._clock()))

    async def _watch(self) -> None:
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._name}",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        lines = LineSplitter(MAX_FRAME)
        path = LEASES.path(self._namespace)
        async with self._client.stream(path, query=query, total=WATCH_SECONDS + 30.0) as chunks:
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    self._handle_line(line)

    def _handle_line(self, line: bytes | Overlong) -> None:
        """Record one line of the watch. Raises ValueError if it does not decode."""
        if isinstance(line, Overlong):
            raise ValueError(f"a frame of more than {MAX_FRAME} bytes")
        match _CODEC.frame(line):
            case Upserted(object=lease):
                self._election.watched(lease, self._clock())
                self._lease_change.set()
            case Deleted(resource_version=version):
                self._election.deleted(version)
                self._lease_change.set()
            case ServerError(code=code, message=message):
                raise ValueError(f"the watch ended with {code}: {message}")
            case Faulted(message=message):
                raise ValueError(message)

    def _log_holder(self) -> None:
        """Log and count a change of the holder."""
        holder = self._election.holder
        if holder and holder != self._holder:
            if self._holder:
                self._on_transition()
            log.info(
                "the lease has a new holder" if self._holder else "the lease has a holder",
                lease=self._lease,
                holder=holder,
            )
            self._holder = holder

    @property
    def _path(self) -> str:
        return LEASES.path(self._namespace, self._name)

    @property
    def _lease(self) -> str:
        return f"{self._namespace}/{self._name}"


def _describe_error(error: BaseException) -> str:
    if isinstance(error, ApiError) and error.status == 403:
        return f"{error}; the role of the controller lacks this verb on {LEASES.resource}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")
