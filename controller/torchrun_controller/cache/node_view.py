"""Nodes: one informer for the whole cluster, and the jobs that a change of a node concerns.

A controller that may not read nodes (one that is limited to namespaces has no right to, unless a
ClusterRole is bound cluster-wide) works all the same, without noticing lost nodes, and says so.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

import anyio
import structlog

from torchrun_api.core import Node
from torchrun_api.kinds import NODES
from torchrun_controller.cache.informer import Informer, Observer
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.workqueue import INITIAL, WorkQueue

# Beyond this silence (a watch that is dead is noticed after 90 s) what the cache says of nodes is
# not acted on: a gang must not be given up because a watch is.
STALE_SECONDS = 120.0
_LOOK_SECONDS = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class ReadErrors(Protocol):
    """How the API server last answered lists and watches."""

    def problem(self, resource: str) -> str:
        """Why the last request failed, "" if it did not."""

    def refused(self, resource: str) -> bool:
        """Whether the last request was refused with 403 or 404."""


class NodeView:
    """The cache of nodes. `concerned` gives the keys of jobs with workers on a node; "" all."""

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        queue: WorkQueue[Key],
        concerned: Callable[[str], Iterable[Key]],
        read_errors: ReadErrors,
        clock: Clock = SYSTEM,
    ) -> None:
        self.informer: Informer[Node] = Informer(
            NODES,
            transport,
            Store(),
            self._changed,
            observer=observer,
            clock=clock.monotonic,
            random=clock.jitter,
        )
        self._queue = queue
        self._concerned = concerned
        self._read_errors = read_errors
        self._listeners: list[Callable[[Change[Node] | None], None]] = []

    def subscribe(self, listener: Callable[[Change[Node] | None], None]) -> None:
        """Have another controller told of each change; None: nodes are known (again), or not."""
        self._listeners.append(listener)

    @property
    def view(self) -> Store[Node] | None:
        """The nodes as they are; None where that is not known."""
        informer = self.informer
        fresh = informer.silence() <= STALE_SECONDS
        return informer.store if informer.synced.is_set() and fresh else None

    @property
    def is_awaited(self) -> bool:
        """Whether nodes are not known now, but may be read: a server that fails will recover."""
        return self.view is None and not self._read_errors.refused(NODES.resource)

    @property
    def _is_starting(self) -> bool:
        """Whether the first list is on its way and no request for it has failed."""
        return not self.informer.synced.is_set() and not self._read_errors.problem(NODES.resource)

    def shortcoming(self) -> str:
        """What the controller does without, and why; "" if nothing."""
        if self.view is not None:
            return ""
        why = self._read_errors.problem(NODES.resource) or "no answer yet"
        missing = "lost nodes are not noticed"
        if self.is_awaited:
            missing += ", and admission by nodes waits"
        return f"{missing}: {why}"

    async def follow(self) -> NoReturn:
        """Look again at every job once nodes are known, or known again; say when they are not."""
        known: bool | None = None
        warned = False
        while True:
            shortcoming = self.shortcoming()
            if known is not (not shortcoming):
                known = not shortcoming
                self._tell(None)
                if known:
                    log.info("sees nodes", nodes=len(self.informer.store))
                    self._add("", INITIAL)
                    warned = False
            if not (known or warned or self._is_starting):
                warned = True
                log.warning("does not see nodes", why=shortcoming)
            await anyio.sleep(_LOOK_SECONDS)

    def _changed(self, change: Change[Node], initial: bool) -> None:
        """Only what decides over a gang concerns its job: not heartbeats, not labels or images."""
        if _facts(change.old) != _facts(change.new):
            self._add(change.object.metadata.name, INITIAL if initial else 0)
        self._tell(change)

    def _tell(self, change: Change[Node] | None) -> None:
        for listener in self._listeners:
            listener(change)

    def _add(self, node: str, priority: int) -> None:
        for key in self._concerned(node):
            self._queue.add(key, priority)


def _facts(node: Node | None) -> tuple[str, bool] | None:
    if node is None:
        return None
    ready = nodes.ready_condition(node)
    return ready.status if ready is not None else "", nodes.out_of_service(node)
