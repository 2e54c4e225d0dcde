"""Leadership for the process: the election carried out against the API server."""

import asyncio
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
    Lost,
    Read,
    Wait,
    Write,
)
from torchrun_controller.watch.lines import LineSplitter, Overlong

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

MAX_FRAME = 2**20  # bytes of a watch line; a Lease has about 1,000
WATCH_SECONDS = 300

# What comes of a server that refuses, is out of reach, is slow, or answers garbage.
TROUBLE = (ApiError, Disconnected, TimeoutError, ValueError, RecursionError)


class NotLeader(Exception):  # noqa: N818 named for the state
    """This process does not hold the lease (any more); the message says why."""


class _Frame(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_FRAME = msgspec.json.Decoder(_Frame)
_LEASE = msgspec.json.Decoder(Lease)


class Requests(Protocol):
    """The part of the transport that a leader needs."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        """Send one request."""

    def stream(
        self, path: str, *, query: Mapping[str, str], total: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a watch."""


class Leadership(Protocol):
    """What the rest of the process sees: `Leader`, or `NoElection` where election is off."""

    @property
    def elected(self) -> asyncio.Event:
        """Set once the process has become the leader; stays set."""

    @property
    def problem(self) -> str:
        """Why the lease could not be read or written last time, "" if it could."""

    async def run(self) -> None:
        """Become the leader and stay it, until cancelled. Raises NotLeader on loss."""

    def may_write(self) -> bool:
        """Whether a write may begin now."""

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""

    async def release(self) -> None:
        """Let a standby take over; for after the last write and the end of `run`."""


class NoElection:
    """Leadership where election is off: the only replica, by the administrator's word."""

    problem = ""

    def __init__(self) -> None:
        self.elected = asyncio.Event()
        self.elected.set()

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def may_write(self) -> bool:
        """Whether a write may begin now: always."""
        return True

    def check(self) -> None:
        """Never raises."""

    async def release(self) -> None:
        """Do nothing."""


class Leader:
    """Leadership by a Lease, for one `run`.

    `identity` is to be unique to the process. `on_transition` is called when the lease is seen to
    change hands. Needs the verbs create, get, patch and watch on leases.coordination.k8s.io.
    """

    def __init__(
        self,
        api: Requests,
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
        self.elected = asyncio.Event()
        self.problem = ""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._election = Election(identity, durations)
        self._on_transition = on_transition
        self._clock = clock
        self._now = now
        self._jitter = jitter
        self._changed = anyio.Event()  # the watch has shown something
        self._holder = ""  # the last one that was reported
        self._has_written = False

    def may_write(self) -> bool:
        """Whether a write may begin now."""
        return self._clock() < self._election.writable_until()

    def check(self) -> None:
        """Raise NotLeader if no write may begin now."""
        if not self.may_write():
            raise NotLeader(f"lease {self._lease} is held by {self._election.holder or 'nobody'}")

    async def run(self) -> None:
        """Become the leader and stay it, until cancelled. Raises NotLeader on loss."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            reason = await self._elect()
            tasks.cancel_scope.cancel()
        raise NotLeader(f"lease {self._lease} is lost: {reason}")

    async def release(self) -> None:
        """Let a standby take over; for after the last write and the end of `run`.

        Takes half the renew deadline at most. A failure is logged: others wait for the expiry then.
        """
        self._election.resign()
        if not self._has_written:
            return
        try:
            with anyio.fail_after(self._election.durations.renew_deadline / 2):
                await self._hand_over()
        except TROUBLE as error:
            log.warning("lease not released", lease=self._lease, error=_words(error))

    async def _elect(self) -> str:
        """Do what the election decides until the lease is lost; returns why it is."""
        while True:
            now = self._clock()
            self._report()
            match self._election.decide(now):
                case Wait(seconds):
                    self._changed = anyio.Event()
                    with anyio.move_on_after(seconds):
                        await self._changed.wait()
                case Read():
                    await self._attempt("get", self._read(), now)
                case Write(version):
                    verb = "patch" if version else "create"
                    await self._attempt(verb, self._write(version, now), now)
                case Lost(reason):
                    return reason
                case decision:
                    assert_never(decision)

    async def _attempt(self, verb: str, request: Coroutine[None, None, None], sent: float) -> None:
        """One request; whatever goes wrong is said once and left to the next decision."""
        self._election.unsure(sent, self._jitter())
        until = self._election.writable_until()
        patience = self._election.durations.renew_deadline / 2
        if until > sent:
            patience = min(patience, until - sent)
        try:
            with anyio.fail_after(patience):
                await request
        except TROUBLE as error:
            problem = f"cannot {verb} lease {self._lease}: {_words(error)}"
            if problem != self.problem:
                log.warning("lease not renewed or read", problem=problem)
            self.problem = problem
        else:
            self.problem = ""

    async def _read(self) -> None:
        try:
            response = await self._api.request("GET", self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            self._election.absent(self._clock(), self._jitter())
            return
        self._election.read(response.read(_LEASE.decode), self._clock(), self._jitter())

    async def _write(self, version: str, sent: float) -> None:
        self._has_written = True
        lease = await self._send(version, self._election.record(self._now()))
        self._election.renewed(lease, sent, self._clock())
        if not self.elected.is_set():
            log.info("elected", lease=self._lease, identity=self._election.identity)
            self.elected.set()

    async def _hand_over(self) -> None:
        """Empty the lease if it is ours, whatever became of the last write."""
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
            log.info("released", lease=self._lease)
            return

    async def _send(self, version: str, spec: JsonObject) -> Lease:
        """Create the lease, or patch its spec: a PUT of our slice would drop labels of others."""
        if version:
            body: JsonObject = {"metadata": {"resourceVersion": version}, "spec": spec}
            method, path, content = "PATCH", self._path, "application/merge-patch+json"
        else:
            meta: JsonObject = {"name": self._name, "namespace": self._namespace}
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": meta}
            body["spec"] = spec
            method, path, content = "POST", LEASES.path(self._namespace), "application/json"
        encoded = msgspec.json.encode(body)
        response = await self._api.request(method, path, body=encoded, content_type=content)
        return response.read(_LEASE.decode)

    async def _follow(self) -> None:
        """Watch the lease; when that ends or fails, again at the pace of a standby's polling."""
        problem = ""
        while True:
            started = self._clock()
            try:
                await self._watch()
                problem = ""
            except TROUBLE as error:
                if problem != (problem := _words(error)):
                    log.warning(
                        "cannot watch the lease, polling it", lease=self._lease, error=problem
                    )
            pace = self._election.pace(self._jitter())
            await anyio.sleep(max(0.0, started + pace - self._clock()))

    async def _watch(self) -> None:
        # Without a resourceVersion a watch begins with the present state, as an ADDED frame.
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._name}",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        lines = LineSplitter(MAX_FRAME)
        path = LEASES.path(self._namespace)
        async with self._api.stream(path, query=query, total=WATCH_SECONDS + 30.0) as chunks:
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    self._frame(line)

    def _frame(self, line: bytes | Overlong) -> None:
        if isinstance(line, Overlong):
            raise ValueError(f"a frame of more than {MAX_FRAME} bytes")
        frame = _FRAME.decode(line)
        if frame.type in ("ADDED", "MODIFIED", "DELETED"):
            lease = _LEASE.decode(frame.object)
            self._election.watched(lease, self._clock(), gone=frame.type == "DELETED")
            self._changed.set()
        elif frame.type == "ERROR":
            raise ValueError(f"the watch ended with {bytes(frame.object)[:200].decode()}")

    def _report(self) -> None:
        """Count and log a change of hands."""
        holder = self._election.holder
        if holder and holder != self._holder:
            if self._holder:
                self._on_transition()
            log.info(
                "lease has changed hands" if self._holder else "lease is held",
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


def _words(error: BaseException) -> str:
    if isinstance(error, ApiError) and error.status == 403:
        return f"{error}; the role of the controller lacks this verb on {LEASES.resource}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")
