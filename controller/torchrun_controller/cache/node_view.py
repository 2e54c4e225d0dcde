"""The view of machines: one informer for the cluster, and whether its cache is current.

A controller that is limited to a namespace usually may not read Nodes. It then does not notice lost
machines, and reports that.
"""

from collections.abc import Callable
from typing import NoReturn

import anyio
import structlog

from torchrun_api.kinds.core import Node
from torchrun_api.kinds.resources import NODES
from torchrun_controller.cache.informer import Informer, Observer
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.pods import nodes
from torchrun_controller.watch import Watcher

# Seconds. After a longer silence the cache is not used: a dead watch must not fail a gang. It is
# noticed after 90 s.
STALE_SECONDS = 120.0
_CHECK_SECONDS = 5.0
_FIRST_LIST_SECONDS = 10.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class NodeView:
    """The cache of machines.

    `on_change` is called with each change, as by an informer; `on_known` when machines become
    known.
    """

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        on_change: Callable[[Change[Node], bool], None],
        on_known: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self.informer: Informer[Node] = Informer(
            Watcher(NODES, clock.jitter),
            transport,
            Store(),
            self._handle_change,
            observer=observer,
            clock=clock.monotonic,
        )
        self._on_change = on_change
        self._on_known = on_known
        self._listeners: list[Callable[[Change[Node] | None], None]] = []

    def subscribe(self, listener: Callable[[Change[Node] | None], None]) -> None:
        """Call `listener` with each change; with None when machines become known or unknown."""
        self._listeners.append(listener)

    @property
    def view(self) -> Store[Node] | None:
        """The cached machines; None while the cache is not filled or stale."""
        informer = self.informer
        is_fresh = informer.silence() <= STALE_SECONDS
        return informer.store if informer.synced.is_set() and is_fresh else None

    @property
    def is_awaited(self) -> bool:
        """Whether machines are unknown although the controller may read Nodes: for a while."""
        return self.view is None and not self.informer.last_read.refused

    def shortcoming(self) -> str:
        """Return what does not work without machines, and why; "" if machines are known."""
        if self.view is not None:
            return ""
        why = self.informer.last_read.problem or "no response yet"
        text = "lost machines are not detected"
        if self.is_awaited:
            text += ", and admission waits for the list of machines"
        return f"{text}: {why}"

    async def wait_until_known(self) -> None:
        """Wait until the cache has its first list, or the list has failed; 10 s at most.

        The placement of a gang with checkpoints on machines depends on them.
        """
        with anyio.move_on_after(_FIRST_LIST_SECONDS):
            await self.informer.first_result.wait()

    async def follow(self) -> NoReturn:
        """Check every few seconds whether machines are known; call `on_known`, or log a warning."""
        is_known: bool | None = None
        has_warned = False
        while True:
            shortcoming = self.shortcoming()
            if is_known is not (not shortcoming):
                is_known = not shortcoming
                self._notify(None)
                if is_known:
                    log.info("machines are readable", nodes=len(self.informer.store))
                    self._on_known()
                    has_warned = False
            if not (is_known or has_warned) and self.informer.first_result.is_set():
                has_warned = True
                log.warning("machines are not readable", why=shortcoming)
            await anyio.sleep(_CHECK_SECONDS)

    def _handle_change(self, change: Change[Node], initial: bool) -> None:
        self._on_change(change, initial)
        self._notify(change)

    def _notify(self, change: Change[Node] | None) -> None:
        for listener in self._listeners:
            listener(change)


def node_facts(node: Node | None) -> tuple[str, bool, str] | None:
    """Return what decides over a gang: the Ready status, out-of-service, and a leaving taint."""
    if node is None:
        return None
    ready = nodes.ready_condition(node)
    leaving = nodes.find_leaving_taint(node)
    return (
        ready.status if ready is not None else "",
        nodes.is_out_of_service(node),
        leaving.key if leaving is not None else "",
    )
