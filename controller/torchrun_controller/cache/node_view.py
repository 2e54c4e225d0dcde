"""The view of nodes: one informer for the cluster, and the jobs that a change of a node wakes.

A controller that is limited to namespaces usually may not read nodes. It then works without
noticing lost nodes, and reports that.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn

import anyio
import structlog

from torchrun_api.core import Node
from torchrun_api.kinds import NODES
from torchrun_controller.cache.informer import Informer, Observer
from torchrun_controller.cache.observe import Key
from torchrun_controller.cache.read_errors import ReadErrors
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.workqueue import INITIAL, WorkQueue

# Seconds. After a longer silence the cache of nodes is not used: a gang must not fail because a
# watch failed. A dead watch is noticed after 90 s.
STALE_SECONDS = 120.0
_LOOK_SECONDS = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class NodeView:
    """The cache of nodes. `concerned` returns keys of jobs with workers on a node, "" for all."""

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
        """Call `listener` with each change; with None when nodes become known or unknown."""
        self._listeners.append(listener)

    @property
    def view(self) -> Store[Node] | None:
        """The nodes; None while they are not known."""
        informer = self.informer
        fresh = informer.silence() <= STALE_SECONDS
        return informer.store if informer.synced.is_set() and fresh else None

    @property
    def is_awaited(self) -> bool:
        """Whether nodes are unknown now but may be read: the server will recover."""
        return self.view is None and not self._read_errors.refused(NODES.resource)

    @property
    def _is_starting(self) -> bool:
        """Whether the first list is under way and no request for it has failed."""
        return not self.informer.synced.is_set() and not self._read_errors.problem(NODES.resource)

    def shortcoming(self) -> str:
        """What does not work, and why; "" if nothing."""
        if self.view is not None:
            return ""
        why = self._read_errors.problem(NODES.resource) or "no answer yet"
        missing = "lost nodes are not noticed"
        if self.is_awaited:
            missing += ", and admission by nodes waits"
        return f"{missing}: {why}"

    async def follow(self) -> NoReturn:
        """Wake every job when nodes become known; log when they are unknown."""
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
        """Wake jobs only for facts that decide over a gang: no heartbeats, labels or images."""
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
