"""The view of scheduling groups: an informer for each kind that is served, while it is served.

The controller creates a group before the child Job and cannot make the Job its owner. So it deletes
the group itself when the gang is over, exactly that one, and must know which groups exist. Its own
groups have its label, so the caches hold a few objects for each job. Only the Workloads of Kueue,
which Kueue creates, are all watched, to show what they wait for.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import anyio
from msgspec import Struct

from torchrun_api import names
from torchrun_api.core import SchedulingGroup
from torchrun_api.kinds import (
    COSCHEDULING_POD_GROUPS,
    KAI_POD_GROUPS,
    KUEUE_WORKLOADS,
    NATIVE_GROUPS,
    VOLCANO_POD_GROUPS,
    Kind,
)
from torchrun_controller.cache.informer import Informer, Observer
from torchrun_controller.cache.store import Change, Store
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM, Clock
from torchrun_controller.reconcile.model.installed import Installed
from torchrun_controller.reconcile.model.observed import Group

OWNER_INDEX = "owner"

Changed: TypeAlias = Callable[[Change[SchedulingGroup], bool], None]
_Watched: TypeAlias = tuple[str, Kind[SchedulingGroup]]  # namespace ("" is all), kind


class _Watch(Struct, frozen=True):
    informer: Informer[SchedulingGroup]
    scope: anyio.CancelScope


def by_owner(group: SchedulingGroup) -> Iterable[str]:
    """Index groups by the UID of their controller."""
    return (owner.uid for owner in group.metadata.owner_references if owner.controller)


def kinds_of(installed: Installed) -> tuple[Kind[SchedulingGroup], ...]:
    """Return the kinds to watch: the newest served version of each scheduler."""
    families = (
        (KAI_POD_GROUPS,),
        (VOLCANO_POD_GROUPS,),
        (COSCHEDULING_POD_GROUPS,),
        NATIVE_GROUPS,
        KUEUE_WORKLOADS,
    )
    newest = (next(filter(installed.serves, family), None) for family in families)
    return tuple(kind for kind in newest if kind is not None)


class GroupView:
    """The caches of groups. `changed` is called with each change; no `namespaces` means all."""

    def __init__(
        self,
        transport: Transport,
        observer: Observer,
        changed: Changed,
        namespaces: tuple[str, ...] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self._informer = partial(
            Informer[SchedulingGroup],
            transport=transport,
            on_change=changed,
            observer=observer,
            clock=clock.monotonic,
            random=clock.jitter,
        )
        self._namespaces = namespaces or ("",)
        self._watches: dict[_Watched, _Watch] = {}
        self._news, self._installed = anyio.Event(), Installed()

    def follow(self, installed: Installed) -> None:
        """Watch exactly the kinds that are installed now."""
        self._installed = installed
        self._news.set()

    def owned_by(self, namespace: str, uid: str) -> tuple[Group, ...]:
        """Return the known groups that the object with this UID controls."""
        return tuple(
            Group(kind, group)
            for (where, kind), watch in self._watches.items()
            if where in ("", namespace)
            for group in watch.informer.store.by_index(OWNER_INDEX, uid)
        )

    @property
    def informers(self) -> list[Informer[SchedulingGroup]]:
        """The informers of kinds that are watched now."""
        return [watch.informer for watch in self._watches.values()]

    async def run(self) -> None:
        """Start and end informers until cancelled."""
        async with anyio.create_task_group() as informers:
            while True:
                self.adjust(lambda watch: informers.start_soon(_run, watch))
                await self._news.wait()
                self._news = anyio.Event()

    def adjust(self, start: Callable[[_Watch], object]) -> None:
        """End the informers of kinds that are gone; create and `start` those of new kinds."""
        wanted = {(n, kind) for n in self._namespaces for kind in kinds_of(self._installed)}
        for gone in self._watches.keys() - wanted:
            self._watches.pop(gone).scope.cancel()
        for namespace, kind in wanted - self._watches.keys():
            watch = _Watch(
                self._informer(
                    kind=kind,
                    store=Store({OWNER_INDEX: by_owner}),
                    label_selector="" if kind in KUEUE_WORKLOADS else names.JOB_LABEL,
                    namespace=namespace,
                ),
                anyio.CancelScope(),
            )
            self._watches[namespace, kind] = watch
            start(watch)


async def _run(watch: _Watch) -> None:
    with watch.scope:
        await watch.informer.run()
