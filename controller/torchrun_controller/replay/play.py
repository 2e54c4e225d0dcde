"""Replay of a recording through watcher, caches, observe and reconcile, at the recorded time.

After each line, the keys that the controller would take are reconciled: those that the change
concerns, and those whose requeueAfter has passed. Nothing is written, so a Plan repeats until the
recording shows its writes.
"""

import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import anyio
from msgspec import Struct

from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import Key
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
    """The result of one reconcile: a Plan, or the traceback of an exception in `bug`.

    `key` is namespace and name of the job, `phase` its observed phase ("" for a new job), `cause`
    the changed object ("pods/train-0"), the resource of a list ("pods"), or "time".
    """

    time: datetime
    key: Key
    cause: str
    phase: str
    plan: Plan = Plan()
    bug: str = ""


class _RecordedResponses(Transport):
    """Answers discovery with the recorded responses. A watch delivers nothing."""

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
    """The caches and the work queue of a controller at one time of a recording.

    `namespaces` are those of the recording, () for all. `ignored` is the number of lines from
    sources that this version does not read.
    """

    def __init__(self, defaults: Defaults, namespaces: tuple[str, ...] = ()) -> None:
        self.ignored = 0
        self._defaults = defaults
        self._now = 0.0
        self._transport = _RecordedResponses()
        clock = Clock(lambda: self._now, self._now_utc, lambda: 0.0)
        self._queue: WorkQueue[Key] = WorkQueue(clock.monotonic)
        self._factory = InformerFactory(self._transport, self._queue, namespaces, clock)
        # A recording has no refusals. Nodes that it does not have are not awaited.
        self._factory.nodes.informer.last_read.record("list", HTTPStatus.FORBIDDEN)
        self._watchers: dict[str, Watcher[Any]] = {}

    async def play(self, lines: Iterable[Line], on_decision: Callable[[Decision], None]) -> None:
        """Apply the lines, and call `on_decision` with every decision, in the order of time.

        Raises what `lines` raises, such as TapeError.
        """
        for line in lines:
            for decision in self._advance(line.time.timestamp()):
                on_decision(decision)
            await self._apply_line(line)
            for decision in self._decide_ready(_cause(line)):
                on_decision(decision)

    def _advance(self, time: float) -> Iterable[Decision]:
        """Advance the clock to `time` (Unix time), and reconcile keys when their deadlines pass."""
        while self._is_ready and (wait := self._queue.next_ready()) is not None:
            if self._now + wait > time:
                break
            self._now += wait
            yield from self._decide_ready("time")
        self._now = max(self._now, time)

    def _decide_ready(self, cause: str) -> Iterable[Decision]:
        if not self._is_ready:
            return
        # Sorted, because the order of keys from sets varies; decisions are independent.
        for key in sorted(iter(self._queue.get, None)):
            decision = self._decide(key, cause)
            self._queue.done(key)
            if decision is not None:
                yield decision

    @property
    def _is_ready(self) -> bool:
        """Whether the controllers would run: caches and discovery have their first results."""
        return self._factory.is_synced and self._factory.discovery.first_poll.is_set()

    def _now_utc(self) -> datetime:
        return datetime.fromtimestamp(self._now, UTC)

    def _decide(self, key: Key, cause: str) -> Decision | None:
        observed = self._factory.observe(*key)
        if observed is None:
            return None
        time = self._now_utc()
        phase = observed.job.status.phase or ""
        try:
            plan = reconcile(observed, time.replace(microsecond=0), defaults=self._defaults)
        except Exception:  # a recording may show a bug of reconcile
            bug = traceback.format_exc(chain=False)
            return Decision(time=time, key=key, cause=cause, phase=phase, bug=bug)
        if plan.requeue_after is not None:
            self._queue.add_after(key, plan.requeue_after)
        return Decision(time=time, key=key, cause=cause, phase=phase, plan=plan)

    async def _apply_line(self, line: Line) -> None:
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
            self.ignored += 1

    def _events(self, informer: Informer[Any], line: Line) -> list[Any]:
        """Return the watcher's events for a line. A new list starts a new watcher."""
        watcher = self._watchers.get(line.source)
        if watcher is None or line.opens or line.first:
            plain_pages = 0 if line.opens else sys.maxsize
            watcher = Watcher(informer.kind, lambda: 0.0, plain_pages=plain_pages)
            self._watchers[line.source] = watcher
            watcher.next(self._now)
            watcher.record_open(self._now)
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
    """Return the changed object of a line, "pods/train-0", or "pods" for a list."""
    name = identity_of(bytes(line.frame))[1]
    return f"{line.resource}/{name}" if name else line.resource
