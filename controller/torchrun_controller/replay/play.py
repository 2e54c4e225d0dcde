"""Play: a recording through watcher, caches, observe and reconcile, with its own time.

Keys are attempted as the controller's workers do, after each line: those that a change concerns,
and those whose Plan asked for another look by then. Nothing is written, so a Plan is repeated until
the recording shows that it was carried out.
"""

import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import anyio
from msgspec import Struct

from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.read_errors import ReadErrors
from torchrun_controller.client import ApiError, Response, Transport
from torchrun_controller.clock import Clock
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Plan
from torchrun_controller.replay.tape import Line, source_of
from torchrun_controller.watch import Synced, Watcher
from torchrun_controller.watch.codec import identity_of
from torchrun_controller.workqueue import WorkQueue

_DISCOVERY: Final = "/apis"


class Decision(Struct, frozen=True, kw_only=True):
    """What reconcile makes of a job at a time. `bug` is a traceback, where it raised."""

    time: datetime
    key: Key
    cause: str
    phase: str
    plan: Plan = Plan()
    bug: str = ""


class _Recorded(Transport):
    """Answers what discovery asks for with what was recorded; watches get nothing."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}

    async def request(self, method: str, path: str, **options: Any) -> Response:  # noqa: ANN401
        """See `Transport.request`."""
        if path not in self.answers:
            raise ApiError(404, "NotFound", f"{path} is not in the recording")
        return Response(200, self.answers[path])

    @asynccontextmanager
    async def stream(self, path: str, **options: Any) -> AsyncIterator[AsyncIterator[bytes]]:  # noqa: ANN401
        """See `Transport.stream`."""
        await anyio.sleep_forever()
        yield NotImplemented


class Player:
    """Holds what is known of the cluster at one time of a recording; see the module.

    `unread` counts the lines of sources that this version does not read.
    """

    def __init__(self, defaults: Defaults, namespaces: tuple[str, ...] = ()) -> None:
        self.unread = 0
        self._defaults = defaults
        self._now = 0.0
        self._transport = _Recorded()
        clock = Clock(lambda: self._now, self._time, lambda: 0.0)
        self._queue: WorkQueue[Key] = WorkQueue(clock.monotonic)
        read_errors = ReadErrors()
        self._factory = InformerFactory(
            self._transport, read_errors, self._queue, namespaces, clock
        )
        self._watchers: dict[str, Watcher[Any]] = {}

    async def play(self, lines: Iterable[Line], tell: Callable[[Decision], None]) -> None:
        """Tell every decision, in the order of time."""
        for line in lines:
            for decision in self._until(line.time.timestamp()):
                tell(decision)
            await self._feed(line)
            for decision in self._drain(_cause(line)):
                tell(decision)

    def _until(self, time: float) -> Iterable[Decision]:
        """Let time pass, and look where a Plan asked for it."""
        while self._is_ready and (wait := self._queue.next_ready()) is not None:
            if self._now + wait > time:
                break
            self._now += wait
            yield from self._drain("time")
        self._now = max(self._now, time)

    def _drain(self, cause: str) -> Iterable[Decision]:
        if not self._is_ready:
            return
        # Sorted, as keys may come out of sets; no decision depends on another.
        for key in sorted(iter(self._queue.get, None)):
            decision = self._decide(key, cause)
            self._queue.done(key)
            if decision is not None:
                yield decision

    @property
    def _is_ready(self) -> bool:
        """As for the controller's workers."""
        return self._factory.is_synced and self._factory.discovery.first_poll.is_set()

    def _time(self) -> datetime:
        return datetime.fromtimestamp(self._now, UTC)

    def _decide(self, key: Key, cause: str) -> Decision | None:
        observed = self._factory.observe(*key)
        if observed is None:
            return None
        time = self._time()
        phase = observed.job.status.phase or ""
        try:
            plan = reconcile(observed, time.replace(microsecond=0), defaults=self._defaults)
        except Exception:  # what a recording of a bug is made for
            bug = traceback.format_exc(chain=False)
            return Decision(time=time, key=key, cause=cause, phase=phase, bug=bug)
        if plan.requeue_after is not None:
            self._queue.add_after(key, plan.requeue_after)
        return Decision(time=time, key=key, cause=cause, phase=phase, plan=plan)

    async def _feed(self, line: Line) -> None:
        informer = self._informers().get(line.source)
        if informer is not None:
            informer.last_seen = self._now
            events = self._events(informer, line)
            await informer.take(events)
            if any(isinstance(event, Synced) for event in events):
                informer.synced.set()
        elif line.page and _is_discovery(line.source):
            self._transport.answers[line.source] = bytes(line.page)
            await self._factory.discovery.poll()
            self._factory.groups.adjust(lambda watch: None)  # the recording feeds its informers
        else:
            self.unread += 1

    def _events(self, informer: Informer[Any], line: Line) -> list[Any]:
        """What the watcher makes of it. Where a list begins, it is a new one."""
        watcher = self._watchers.get(line.source)
        if watcher is None or line.opens or line.first:
            plain_pages = 0 if line.opens else sys.maxsize
            watcher = Watcher(informer.kind, lambda: 0.0, plain_pages=plain_pages)
            self._watchers[line.source] = watcher
            watcher.next(self._now)
            watcher.opened(self._now)
        if line.page:
            return watcher.page(bytes(line.page), self._now)
        frame = bytes(line.frame) or line.text.encode()
        return watcher.receive(frame + b"\n", self._now)

    def _informers(self) -> Mapping[str, Informer[Any]]:
        informers = (*self._factory.informers, *self._factory.groups.informers)
        return {source_of(informer.path, informer.selectors): informer for informer in informers}


def _is_discovery(source: str) -> bool:
    return source == _DISCOVERY or source.endswith("/topologies")


def _cause(line: Line) -> str:
    """What was sent: `pods/train-0`, or `pods` for a list."""
    name = identity_of(bytes(line.frame))[1]
    return f"{line.resource}/{name}" if name else line.resource
