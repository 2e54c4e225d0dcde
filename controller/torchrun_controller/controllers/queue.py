"""The reconciler of TorchrunQueues: observe, reconcile, apply.

A refused object does not stop the queue's other objects. The status shows it, and it is retried
when the spec changes, or after a minute.
"""

import math
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import TORCHRUN_QUEUES
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
)
from torchrun_controller.controllers.controller import Done, Outcome, RequeueAfter, log_fields
from torchrun_controller.controllers.writes import BEHIND_RETRY, EventSink, Throttled, Writes
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.queue import ObservedQueue, QueuePlan, TemplateCheck

REFUSED_RETRY = 60.0  # seconds until a refused write or dry run is retried

log = structlog.get_logger(__name__)


class DryRunner(Protocol):
    """The part of the Applier that tries the pod template of a queue."""

    async def dry_run(self, intent: Apply) -> None:
        """See `Applier.dry_run`."""


Observe: TypeAlias = Callable[[str, str], ObservedQueue | None]
Decide: TypeAlias = Callable[[ObservedQueue, datetime], QueuePlan]


class _Memory(Struct):
    """The state of one queue that is not in the caches. A new process starts without it."""

    generation: tuple[str, int]  # UID and generation of the queue
    template_check: TemplateCheck | None = None
    check_again: float = math.inf  # the time of the next dry run after one that failed
    # By resource and name: the message of a refusal, and the time of the next try.
    refused: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)


class QueueReconciler:
    """Reconciles the keys of queues. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        *,
        observe: Observe,
        decide: Decide,
        applier: DryRunner,
        writes: Writes[Key],
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).replace(microsecond=0),
    ) -> None:
        self._observe = observe
        self._decide = decide
        self._applier = applier
        self._writes = writes
        self._events = events
        self._clock = clock
        self._now = now
        self._memories: dict[Key, _Memory] = {}  # of existing queues

    async def attempt(self, key: Key) -> Outcome:
        """Reconcile the key once. Raises what `Applier` raises."""
        behind = self._writes.behind(key)
        if behind is not None:
            return behind
        observed = self._observe(*key)
        if observed is None:
            self._memories.pop(key, None)
            self._writes.forget(key)
            return Done()
        memory = self._find_memory(key, observed.queue)
        plan = self._plan(observed, memory)
        if plan.trial is not None:
            memory.template_check = await self._check_template(observed.queue, plan.trial)
            is_accepted = memory.template_check.accepted == "True"
            memory.check_again = math.inf if is_accepted else self._clock() + REFUSED_RETRY
            plan = self._plan(observed, memory)
        if await self._carry_out(key, observed.queue, memory, plan):
            # Report only refused objects; the rest succeeded.
            new_plan = self._plan(observed, memory)
            plan = replace(plan, status=new_plan.status, events=new_plan.events)
        if any(intent.kind is TORCHRUN_QUEUES for intent in plan.applies) and not memory.refused:
            # The queue has a new resourceVersion, so its status waits for the cache event.
            return RequeueAfter(BEHIND_RETRY)
        delay = await self._write_status(key, observed.queue, plan)
        retry_times = [time for _, time in memory.refused.values()] + [memory.check_again]
        waits = [time - self._clock() for time in retry_times if time < math.inf]
        if delay is not None:
            waits.append(delay)
        return RequeueAfter(max(0.0, min(waits))) if waits else Done()

    def _find_memory(self, key: Key, queue: TorchrunQueue) -> _Memory:
        generation = (queue.metadata.uid, queue.metadata.generation)
        memory = self._memories.get(key)
        if memory is None or memory.generation != generation:
            memory = self._memories[key] = _Memory(generation)
            self._writes.forget(key)
        return memory

    def _plan(self, observed: ObservedQueue, memory: _Memory) -> QueuePlan:
        now = self._clock()
        if now >= memory.check_again:
            memory.template_check, memory.check_again = None, math.inf
        memory.refused = {
            write_key: refusal for write_key, refusal in memory.refused.items() if refusal[1] > now
        }
        refused = {write_key: message for write_key, (message, _) in memory.refused.items()}
        current = replace(observed, refused=refused, template_check=memory.template_check)
        return self._decide(current, self._now())

    async def _check_template(self, queue: TorchrunQueue, trial: Apply) -> TemplateCheck:
        """Send the template as a dry run. Raises UnavailableError without a result."""
        generation = queue.metadata.generation
        try:
            await self._applier.dry_run(trial)
        except RejectedError as error:
            # 403: a role, a quota or a webhook forbids it; the template may be correct.
            return TemplateCheck(generation, "False" if error.permanent else "Unknown", str(error))
        except (NameConflictError, SupersededError, ApiError) as error:
            return TemplateCheck(generation, "Unknown", str(error))
        return TemplateCheck(generation, "True")

    async def _carry_out(
        self, key: Key, queue: TorchrunQueue, memory: _Memory, plan: QueuePlan
    ) -> bool:
        """Apply and delete; return whether something was refused."""
        refusals_before = len(memory.refused)
        fields = log_fields("queue", queue)
        for intent in plan.applies:
            write_key = (intent.kind.resource, intent.name)
            await self._write_object(
                memory,
                write_key,
                self._writes.write(key, intent, fields),
                fields,
            )
        for delete in plan.deletes:
            write_key = (delete.kind.resource, delete.name)
            await self._write_object(
                memory,
                write_key,
                self._writes.write(key, delete, fields),
                fields,
            )
        return len(memory.refused) > refusals_before

    async def _write_object(
        self,
        memory: _Memory,
        write_key: tuple[str, str],
        write: Coroutine[Any, Any, object],
        fields: Mapping[str, str],
    ) -> None:
        try:
            await write
        except (NameConflictError, RejectedError, ApiError) as error:
            message = error.message if isinstance(error, ApiError) else str(error)
            log.warning(
                "object refused",
                **fields,
                resource=write_key[0],
                name=write_key[1],
                error=message,
            )
            memory.refused[write_key] = (message, self._clock() + REFUSED_RETRY)

    async def _write_status(self, key: Key, queue: TorchrunQueue, plan: QueuePlan) -> float | None:
        """Write status and events, or return the seconds for which they are throttled."""
        status = plan.status
        if status is None:
            return None
        result = await self._writes.write_status(key, queue, status)
        if isinstance(result, Throttled):
            return result.seconds
        if result is not None and status.phase != queue.status.phase:
            fields = log_fields("queue", queue)
            log.info("phase changed", **fields, was=queue.status.phase, phase=status.phase)
        for event in plan.events:
            self._events.record(queue, event)
        return None
