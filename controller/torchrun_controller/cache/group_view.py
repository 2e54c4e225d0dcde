"""The view of scheduling groups: an informer for each kind that is served, while it is served.

The controller creates a group before the child Job, so the Job cannot own it. It deletes the group
after the gang, and must know which groups exist. Its own groups have its label, so the caches have
a few objects for each job. Kueue creates its Workloads itself: all of them are watched, to report
what they wait for.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import anyio
from msgspec import Struct

from torchrun_api import names
from torchrun_api.kinds.core import SchedulingGroup
from torchrun_api.kinds.resources import Kind
from torchrun_controller.cache.informer import Informer, Observer, longest_silence
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.model.observed import Group, Installed
from torchrun_controller.reconcile.schedulers.table import OBSERVED_GROUP_KINDS, SCHEDULERS
from torchrun_controller.watch import Watcher

OWNER_INDEX = "owner"

OnChange: TypeAlias = Callable[[Kind[Any], Change[SchedulingGroup], bool], None]
"""Called with the kind, the change, and whether it comes from a list."""


class _Watch(Struct, frozen=True):
    informer: Informer[SchedulingGroup]
    scope: anyio.CancelScope


def by_owner(group: SchedulingGroup) -> Iterable[str]:
    """Index groups by the UID of their controller."""
    return (owner.uid for owner in group.metadata.owner_references if owner.controller)


def select_kinds(installed: Installed) -> tuple[Kind[SchedulingGroup], ...]:
    """Return the kinds to watch: the newest served version of each scheduler."""
    families = (scheduler.kinds for scheduler in SCHEDULERS.values())
    newest = (next(filter(installed.serves, kinds), None) for kinds in families)
    return tuple(kind for kind in newest if kind is not None)


class GroupView:
    """The caches of groups. `on_change` is called with each change; no `namespace` means all."""

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        on_change: OnChange,
        namespace: str = "",
        clock: Clock = SYSTEM,
    ) -> None:
        self._informer = partial(
            Informer[SchedulingGroup],
            transport=transport,
            namespace=namespace,
            observer=observer,
            clock=clock.monotonic,
        )
        self._jitter = clock.jitter
        self._on_change = on_change
        self._watches: dict[Kind[SchedulingGroup], _Watch] = {}
        self._installed_change, self._installed = anyio.Event(), Installed()

    def follow(self, installed: Installed) -> None:
        """Watch the kinds that are installed now, and no others."""
        self._installed = installed
        self._installed_change.set()

    def owned_by(self, uid: str) -> tuple[Group, ...]:
        """Return the cached groups that the object with this UID controls."""
        return tuple(
            Group(kind, group)
            for kind, watch in self._watches.items()
            for group in watch.informer.store.by_index(OWNER_INDEX, uid)
        )

    @property
    def informers(self) -> list[Informer[SchedulingGroup]]:
        """The informers of the watched kinds."""
        return [watch.informer for watch in self._watches.values()]

    def silence(self, resource: str) -> float:
        """Return the seconds since the watches of a kind last delivered a byte; 0 without any."""
        return longest_silence(i for i in self.informers if i.kind.resource == resource)

    async def run(self) -> None:
        """Start and cancel informers until cancelled."""
        async with anyio.create_task_group() as informers:
            while True:
                self.adjust(lambda watch: informers.start_soon(_run, watch))
                await self._installed_change.wait()
                self._installed_change = anyio.Event()

    def adjust(self, start: Callable[[_Watch], object]) -> None:
        """Cancel the informers of removed kinds; create and `start` those of new kinds."""
        required_kinds = set(select_kinds(self._installed))
        for removed_kind in self._watches.keys() - required_kinds:
            self._watches.pop(removed_kind).scope.cancel()
        for kind in required_kinds - self._watches.keys():
            selector = "" if kind in OBSERVED_GROUP_KINDS else names.JOB_LABEL
            informer = self._informer(
                watcher=Watcher(kind, self._jitter, label_selector=selector),
                on_change=partial(self._on_change, kind),
                store=Store({OWNER_INDEX: by_owner}),
            )
            watch = _Watch(informer, anyio.CancelScope())
            self._watches[kind] = watch
            start(watch)


async def _run(watch: _Watch) -> None:
    with watch.scope:
        await watch.informer.run()
