"""Worlds in which the real reconcilers write, and the requests that the API server gets.

Golden files hold these requests in their order. They judge a decision together with how it is
carried out, and do not depend on the types between the two.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
import yaml

from queue_world import NOTHING, QueueWorld
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import (
    KAI_QUEUES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    Kind,
    UserObject,
)
from torchrun_controller.cache.expectations import Expectations
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import ApiError, Response
from torchrun_controller.client.apply import ABSENT, APPLY_PATCH, Applier, Status, WriteResult
from torchrun_controller.controllers.controller import Outcome
from torchrun_controller.controllers.job import JobReconciler
from torchrun_controller.controllers.queue import QueueReconciler
from torchrun_controller.controllers.writes import Writes
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile import Observed, Plan, reconcile
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.model.plan import Apply, Delete, Event
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.queue import ObservedQueue, QueuePlan, reconcile_queue
from world import START, World

T = TypeVar("T")

GOLDEN = Path(__file__).parent / "unit" / "reconcile" / "golden"
_PAUSE = 2.0  # seconds of the monotonic clock from one attempt to the next: no status is throttled


class ApiRequests:
    """Answers requests like an API server, and records them and the events in their order.

    `find` returns an object by its plural and name, None without one. `pods` returns all pods.
    `refused` has the status and message of the answer to a request, by its method and path.
    """

    def __init__(
        self, find: Callable[[str, str], Any], pods: Callable[[], list[Pod]] = list
    ) -> None:
        self._find = find
        self._pods = pods
        self.recorded: list[JsonObject] = []
        self.refused: dict[tuple[str, str], tuple[int, str]] = {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        content_type: str = APPLY_PATCH,
        headers: Mapping[str, str] = {},
        timeout: float = 30.0,  # noqa: ASYNC109 as in Transport.request
    ) -> Response:
        """Record the request. Raises ApiError."""
        parameters = "&".join(f"{name}={value}" for name, value in query.items())
        target = f"{path}?{parameters}" if parameters else path
        entry: JsonObject = {"request": f"{method} {target}"}
        if method == "PATCH" and content_type != APPLY_PATCH:
            entry["contentType"] = content_type
        content: Any = {} if body is None else msgspec.json.decode(body)
        if content:
            entry["body"] = content
        self.recorded.append(entry)
        if refusal := self.refused.get((method, path)):
            entry["answer"] = refusal[0]
            raise ApiError(refusal[0], "", refusal[1])
        if method == "GET" and query:
            pods = [{"metadata": pod.metadata} for pod in self._pods() if alive(pod)]
            return Response(200, msgspec.json.encode({"items": pods}))
        *_, plural, name = path.removesuffix("/status").split("/")
        found = self._find(plural, name)
        if method == "GET" and found is None:
            raise ApiError(404, "NotFound", f"{plural} {name!r} not found")
        if found is not None and content.get("metadata", {}).get("resourceVersion") == ABSENT:
            entry["answer"] = 409
            raise ApiError(409, "Conflict", "the object has been modified")
        meta = msgspec.to_builtins(found.metadata) if found is not None else {"uid": "uid-new"}
        meta["resourceVersion"] = meta.get("resourceVersion") or "1"
        return Response(200, msgspec.json.encode({"metadata": meta}))

    def record(self, regarding: UserObject, event: Event) -> None:
        """Record an event."""
        self.recorded.append({"event": f"{event.type} {event.reason}: {event.message}"})

    def check(self) -> None:
        """This process leads."""

    def take(self) -> list[JsonObject]:
        """Return what has been recorded, and forget it."""
        taken, self.recorded = self.recorded, []
        return taken


class Written(Protocol):
    """What a world does with the writes that the API server accepts."""

    def write(self, write: Apply | Delete) -> None:
        """Change an object."""

    def write_status(self, status: Any) -> None:
        """Change the status of the job or queue."""


class WorldApplier(Applier):
    """The real Applier. What the API server accepts changes the world."""

    def __init__(self, requests: ApiRequests, world: Written) -> None:
        super().__init__(requests, requests, lambda: "a random key")
        self._world = world

    async def apply(self, intent: Apply) -> WriteResult:
        """See `Applier.apply`."""
        result = await super().apply(intent)
        self._world.write(intent)
        return result

    async def delete(self, delete: Delete) -> WriteResult | None:
        """See `Applier.delete`."""
        result = await super().delete(delete)
        self._world.write(delete)
        return result

    async def apply_status(
        self, owner: UserObject, status: Status, manager: str = "torchrun-controller-status"
    ) -> WriteResult | None:
        """See `Applier.apply_status`."""
        result = await super().apply_status(owner, status, manager)
        self._world.write_status(status)
        return result


class ShellWorld(World):
    """A world of one job that the real JobReconciler writes."""

    def __init__(self, job: TorchrunJob, queue: TorchrunQueue | None) -> None:
        super().__init__(job, queue)
        self.api = ApiRequests(self.stored, self._pods)
        self._attempts = 0
        self.restart()

    def restart(self) -> None:
        """A new process of the controller takes over."""
        applier = WorldApplier(self.api, self)
        metrics = Metrics()
        self._reconciler = JobReconciler(
            observe=lambda namespace, name: None if self.gone else self.observed(),
            decide=self._decide,
            applier=applier,
            writes=Writes(applier, Expectations(lambda _: {}, self._clock), metrics, self._clock),
            events=self.api,
            metrics=metrics,
            clock=self._clock,
            now=lambda: self.now,
        )

    def step(self, writes: int | None = None) -> Plan:
        """Reconcile once."""
        assert writes is None, "the process of a shell does not die"
        self.attempt()
        return self.plans[-1]

    def attempt(self) -> Outcome:
        """Reconcile once, after the throttle of the status has passed."""
        self._attempts += 1
        meta = self.job.metadata
        return finish(self._reconciler.attempt((meta.namespace, meta.name)))

    def step_and_take(self) -> list[JsonObject]:
        """Reconcile once, and return what is sent."""
        self.step()
        return self.api.take()

    def rest(self) -> Plan:
        """Reconcile until nothing is sent."""
        for _ in range(10):
            before = len(self.api.recorded)
            plan = self.step()
            if len(self.api.recorded) == before or self.gone:
                return plan
        raise AssertionError(f"no rest after ten reconciles: {self.api.recorded[-1]}")

    def refuse(self, method: str, kind: Kind[Any], name: str, status: int, message: str) -> None:
        """The API server refuses requests of this method for an object."""
        self.api.refused[method, kind.path("ml", name)] = (status, message)

    def _clock(self) -> float:
        return (self.now - START).total_seconds() + self._attempts * _PAUSE

    def _decide(self, observed: Observed, now: datetime) -> Plan:
        self.plans.append(reconcile(observed, now, self.defaults))
        return self.plans[-1]

    def stored(self, plural: str, name: str) -> Any:
        """Return an object as the API server has it, None without one."""
        if plural == TORCHRUN_JOBS.plural:
            return None if self.gone else self.job
        return self.objects.get((plural, name))

    def _pods(self) -> list[Pod]:
        return [each for each in self.objects.values() if isinstance(each, Pod)]


class ShellQueueWorld(QueueWorld):
    """A world of one queue that the real QueueReconciler writes."""

    def __init__(self, queue: TorchrunQueue, installed: Installed | None = NOTHING) -> None:
        super().__init__(queue, installed)
        self.api = ApiRequests(self._stored)
        self._attempts = 0
        applier = WorldApplier(self.api, self)
        expectations: Expectations[Key] = Expectations(lambda _: {}, self._clock)
        self._reconciler = QueueReconciler(
            observe=lambda namespace, name: None if self.queue is None else self.observed(),
            decide=self._decide,
            applier=applier,
            writes=Writes(applier, expectations, Metrics(), self._clock),
            events=self.api,
            clock=self._clock,
            now=lambda: self.now,
        )

    def step(self) -> QueuePlan:
        """Reconcile once."""
        assert self.queue is not None
        self._attempts += 1
        meta = self.queue.metadata
        finish(self._reconciler.attempt((meta.namespace, meta.name)))
        return self.plans[-1]

    def settle(self) -> None:
        """Reconcile until nothing is sent."""
        for _ in range(10):
            before = len(self.api.recorded)
            if self.queue is None:
                return
            self.step()
            if len(self.api.recorded) == before:
                return
        raise AssertionError(f"no rest after ten reconciles: {self.api.recorded[-1]}")

    def _stored(self, plural: str, name: str) -> Any:
        if plural == KAI_QUEUES.plural:
            return (self.kai or {}).get(name)
        return self.queue if plural == TORCHRUN_QUEUES.plural else None

    def _clock(self) -> float:
        return (self.now - START).total_seconds() + self._attempts * _PAUSE

    def _decide(self, observed: ObservedQueue, now: datetime) -> QueuePlan:
        self.plans.append(reconcile_queue(observed, now, self.defaults))
        return self.plans[-1]


def finish(attempt: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        attempt.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError(f"{attempt} waits")


class Shortener:
    """Shows of each new object, and of each status, what differs from the last one of its kind."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], Any] = {}

    def shorten(self, sent: list[JsonObject]) -> list[JsonObject]:
        """Return the entries with `changed` in place of long bodies."""
        return [self._shortened(entry) for entry in sent]

    def _shortened(self, entry: JsonObject) -> JsonObject:
        body: Any = entry.get("body", {})
        meta = body.get("metadata", {})
        if "status" not in body and meta.get("resourceVersion") != ABSENT:
            return entry
        role = meta.get("labels", {}).get(names.ROLE_LABEL)
        key = (body["kind"], "status" in body, role)
        before, self._last[key] = self._last.get(key), body
        if before is None:
            return entry
        rest = {name: value for name, value in entry.items() if name != "body"}
        return {**rest, "changed": changes(before, body)}


def changes(before: Any, after: Any) -> Any:
    """Return what differs, as in a merge patch. Entries of lists are compared by name or type."""
    before, after = (_by_name(value) for value in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    return {
        name: changes(before.get(name), after.get(name))
        for name in (*after, *(name for name in before if name not in after))
        if before.get(name) != after.get(name)
    }


def _by_name(value: Any) -> Any:
    """Return the list as a dict, if each of its entries has a name or a type of its own."""
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        return value
    named = {each.get("name", each.get("type")): each for each in value}
    return named if len(named) == len(value) and None not in named else value


def as_documents(steps: Iterable[tuple[str, list[JsonObject]]]) -> str:
    """One YAML document for each step: what happens, and what is sent then."""
    return yaml.safe_dump_all(
        [{"step": what, "sent": sent} for what, sent in steps],
        sort_keys=False,
        width=100,
    )


def compare(text: str, path: Path, options: pytest.Config) -> None:
    """Compare with a golden file. `--update-golden` writes it."""
    if options.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
