"""Keeps a store equal to the server's objects of one kind, and reports each change.

    watcher = Watcher(PODS, random.random, label_selector="...")
    informer = Informer(watcher, transport, Store({"job": ...}), on_change)
    tasks.start_soon(informer.run)
    await informer.synced.wait()

The watcher is the state machine; the informer sends its requests and passes back the responses.
"""

import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import anyio
import anyio.lowlevel
import structlog

from torchrun_api.kinds.resources import Object
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import ApiError, Disconnected, Response, Silent, Transport
from torchrun_controller.client.errors import explain_refusal
from torchrun_controller.watch import (
    Bookmarked,
    Deleted,
    Event,
    Faulted,
    FetchPage,
    Interrupted,
    OpenStream,
    StreamFailure,
    Synced,
    Upserted,
    Watcher,
    WatchPause,
    WatchState,
)
from torchrun_controller.watch.codec import METADATA_ONLY, read_versions
from torchrun_controller.watch.sharing import share_parts

T = TypeVar("T", bound=Object)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

# Changes of a list that are reported without yielding to the event loop: a few milliseconds.
_BATCH = 500
_PAGE = 500  # client-go's
_NO_HEADERS: Mapping[str, str] = {}


class Observer(Protocol):
    """Receives events for metrics; `resource` is as RBAC names it."""

    def synced(self, resource: str, objects: int) -> None:
        """A whole list has replaced the store."""

    def changed(self, resource: str) -> None:
        """One event of a watch has changed the store."""

    def faulted(self, resource: str) -> None:
        """One frame was skipped because it could not be used."""

    def interrupted(self, resource: str, reason: str, relist: bool) -> None:
        """A list or watch has failed; `reason` is one of a few CamelCase words."""


class Unobserved:
    """An observer that does nothing."""

    def synced(self, resource: str, objects: int) -> None:
        """Do nothing."""

    def changed(self, resource: str) -> None:
        """Do nothing."""

    def faulted(self, resource: str) -> None:
        """Do nothing."""

    def interrupted(self, resource: str, reason: str, relist: bool) -> None:
        """Do nothing."""


class LastRead:
    """The HTTP code of the last list or watch of `resource`, 0 without a response."""

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._verb, self._code = "list", 200

    def record(self, verb: str, code: int) -> None:
        """Record a request. A streamed list is a watch, and needs the verb watch only."""
        self._verb, self._code = verb, code

    @property
    def problem(self) -> str:
        """Why the request failed, and what to do; "" if it succeeded."""
        if 200 <= self._code < 300:
            return ""
        return explain_refusal(self._verb, self._resource, self._code, f"HTTP {self._code}")

    @property
    def refused(self) -> bool:
        """Whether the resource is forbidden or not served (403, 404)."""
        return self._code in (403, 404)


class Informer(Generic[T]):
    """Lists and watches the kind of `watcher` while `run` runs.

    `on_change` is called on the event loop after each change of the store. Its second argument is
    True for changes from a list (the first one, or a relist); client-go gives those a low priority.
    It must only add keys to queues. `namespace` limits the watched objects; "" is no limit.
    """

    def __init__(
        self,
        watcher: Watcher[T],
        transport: Transport,
        store: Store[T],
        on_change: Callable[[Change[T], bool], None],
        *,
        namespace: str = "",
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.kind = watcher.kind
        self.path = watcher.kind.path(namespace)
        self.store = store
        # Set when the first list is reported and the following watch is open.
        self.synced = anyio.Event()
        # Set with `synced`, or when the first list fails.
        self.first_result = anyio.Event()
        # Whether the store has a list whose changes are not all reported yet.
        self.is_reporting_list = False
        # The time on `clock` when the server last sent a byte or opened a watch.
        self.last_seen = clock()
        self._last_action = self.last_seen  # the time of the last step of `run`
        self.last_read = LastRead(self.kind.resource)
        self._transport = transport
        self._on_change = on_change
        self._observer = observer or Unobserved()
        self._clock = clock
        self._sleep = sleep
        self._watcher = watcher
        self._waiters: list[tuple[int, int, anyio.Event]] = []  # a heap, by version
        self._order = itertools.count()

    async def run(self) -> NoReturn:
        """Run until cancelled. Errors of the server do not end it."""
        while True:
            self._last_action = self._clock()
            match self._watcher.next(self._last_action):
                case WatchPause(seconds=seconds):
                    await self._sleep(seconds)
                case FetchPage() as fetch:
                    await self._fetch(fetch)
                case stream:
                    await self._stream(stream)

    def silence(self) -> float:
        """Return the seconds since the server last sent a byte or opened a watch."""
        return self._clock() - self.last_seen

    def idle(self) -> float:
        """Return the seconds since `run` last acted: two minutes at most, unless it hangs.

        It retries a server that is not reached, and opens a silent watch again.
        """
        return self._clock() - max(self._last_action, self.last_seen)

    async def wait_for(self, resource_version: int, seconds: float) -> bool:
        """Wait until the store reflects the resourceVersion of a write; False after `seconds`.

        The selectors of the informer must include the written object.
        """
        if self.store.resource_version >= resource_version:
            return True
        event = anyio.Event()
        heapq.heappush(self._waiters, (resource_version, next(self._order), event))
        with anyio.move_on_after(seconds):
            await event.wait()
        return event.is_set()

    async def newest(self) -> int:
        """Return the newest resourceVersion of the listed objects on the server, 0 without objects.

        Sends one consistent list of metadata, in pages. Raises ApiError and Disconnected.
        """
        newest, query = 0, {"limit": str(_PAGE)}
        while True:
            response = await self._get(query, headers=METADATA_ONLY)
            page = response.read(read_versions)
            newest = max(newest, page.newest)
            if not page.next:
                return newest
            query = {**query, "continue": page.next}

    async def _get(
        self,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        timeout: float = 30.0,  # noqa: ASYNC109 see Transport.request
    ) -> Response:
        try:
            response = await self._transport.read_list(
                self.path, query=query, headers=headers, timeout=timeout
            )
        except (ApiError, Disconnected) as error:
            self.last_read.record("list", _code_of(error))
            raise
        self.last_read.record("list", response.status)
        return response

    async def _fetch(self, fetch: FetchPage) -> None:
        try:
            response = await self._get(fetch.query, timeout=fetch.timeout)
        except (ApiError, Disconnected) as error:
            events = self._watcher.failed(_convert_error(error, self.kind.resource), self._clock())
        else:
            self.last_seen = self._clock()
            events = self._watcher.page(response.body, self.last_seen)
        await self.take(events)

    async def _stream(self, stream: OpenStream) -> None:
        try:
            async with self._transport.stream(
                self.path, query=stream.query, silence=stream.silence, total=stream.total
            ) as chunks:
                self.last_seen = self._clock()
                self.last_read.record("watch", HTTPStatus.OK)
                self._watcher.record_open(self.last_seen)
                self._update_synced()
                async for chunk in chunks:
                    self.last_seen = self._clock()
                    events = self._watcher.receive(chunk, self.last_seen)
                    await self.take(events)
                    self._update_synced()
                    if events and isinstance(events[-1], Interrupted):
                        return
        except (ApiError, Disconnected) as error:
            self.last_read.record("watch", _code_of(error))
            events = self._watcher.failed(_convert_error(error, self.kind.resource), self._clock())
        else:
            events = self._watcher.closed(self._clock())
        await self.take(events)

    async def take(self, events: list[Event[T]]) -> None:
        """Apply a watcher's events to the store and report the changes."""
        for event in events:
            match event:
                case Synced():
                    await self._replace(event)
                case Upserted(object=obj, resource_version=version):
                    last = self.store.get(obj.metadata.namespace, obj.metadata.name)
                    self._report_change(self.store.upsert(share_parts(obj, last), version))
                case Deleted(key=(namespace, name), resource_version=version):
                    change = self.store.delete(namespace, name, version)
                    if change is not None:
                        self._report_change(change)
                case Bookmarked(resource_version=version):
                    self.store.advance(version)
                case Faulted():
                    self._report_fault(event)
                case interrupted:
                    self._report_interruption(interrupted)
        self._wake_waiters()

    async def _replace(self, list_: Synced[T]) -> None:
        self.is_reporting_list = True
        changes = self.store.replace(list_.objects, list_.resource_version, list_.unreadable)
        self._wake_waiters()
        for number, change in enumerate(changes, start=1):
            self._notify(change, initial=True)
            # The deletions come first, and together: nobody may see the store without a pod before
            # the pod is known to have vanished.
            if number % _BATCH == 0 and change.new is not None:
                await anyio.lowlevel.checkpoint()
        self.is_reporting_list = False
        self._observer.synced(self.kind.resource, len(list_.objects))

    def _update_synced(self) -> None:
        if self._watcher.state is WatchState.WATCHING:
            self.synced.set()
            self.first_result.set()

    def _report_change(self, change: Change[T]) -> None:
        self._observer.changed(self.kind.resource)
        self._notify(change, initial=False)

    def _notify(self, change: Change[T], *, initial: bool) -> None:
        try:
            self._on_change(change, initial)
        except Exception as error:  # a bug in a callback must not end the watch
            metadata = change.object.metadata
            self._observer.faulted(self.kind.resource)
            log.exception(
                "a change could not be processed",
                resource=self.kind.resource,
                namespace=metadata.namespace,
                name=metadata.name,
                error=str(error),
            )

    def _report_fault(self, fault: Faulted) -> None:
        namespace, name = fault.key
        self._observer.faulted(self.kind.resource)
        log.error(
            "an object cannot be decoded; its last known state is used",
            resource=self.kind.resource,
            namespace=namespace,
            name=name,
            error=fault.message,
        )

    def _report_interruption(self, interrupted: Interrupted) -> None:
        if interrupted.delay:  # else another way to list follows at once
            self.first_result.set()
        self._observer.interrupted(self.kind.resource, interrupted.reason, interrupted.relist)
        write_line = log.debug if interrupted.reason == Interrupted.SILENT else log.warning
        write_line(
            "list or watch interrupted",
            resource=self.kind.resource,
            reason=interrupted.reason,
            error=interrupted.message,
            next="list" if interrupted.relist else "watch",
            delay=round(interrupted.delay, 3),
        )

    def _wake_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.store.resource_version:
            _, _, event = heapq.heappop(self._waiters)
            event.set()


def longest_silence(informers: Iterable[Informer[Any]]) -> float:
    """Return the seconds since the last delivery; 0 before the first list."""
    return max((i.silence() for i in informers if i.synced.is_set()), default=0.0)


def _code_of(error: ApiError | Disconnected) -> int:
    return error.status if isinstance(error, ApiError) else 0


def _convert_error(error: ApiError | Disconnected, resource: str) -> StreamFailure:
    if isinstance(error, ApiError):
        if error.status == HTTPStatus.NOT_FOUND:
            message = f"{error}; install the CustomResourceDefinition of {resource}"
            return StreamFailure(message, error.status, error.retry_after)
        return StreamFailure(str(error), error.status, error.retry_after)
    return StreamFailure(str(error), silent=isinstance(error, Silent))
