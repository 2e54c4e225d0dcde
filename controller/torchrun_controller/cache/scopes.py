"""The namespaces of the caches, and which of them are left out.

A namespace that the controller cannot read does not stop the others. It is left out: nothing is
observed there until all of its caches are filled and current.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import structlog
from msgspec import Struct

from torchrun_api.core import CoreEvent
from torchrun_api.kinds import TORCHRUN_JOBS, TORCHRUN_QUEUES
from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.observe import Caches
from torchrun_controller.cache.store import Store

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Scope(Struct, frozen=True):
    """One namespace, or all of them: the caches, and the informers that fill them, by resource."""

    caches: Caches
    informers: dict[str, Informer[Any]]
    stores: dict[str, Store[Any]]
    warnings: Informer[CoreEvent]

    @property
    def is_synced(self) -> bool:
        """Whether every required cache has its first list."""
        return all(informer.synced.is_set() for informer in self.informers.values())

    @property
    def is_refused(self) -> bool:
        """Whether the controller may not read a required kind, as in a deleted namespace."""
        return any(informer.last_read.refused for informer in self.informers.values())

    @property
    def status_informers(self) -> list[Informer[Any]]:
        """The informers of jobs and queues, whose status is the only state that leaders share."""
        return [self.informers[kind.resource] for kind in (TORCHRUN_JOBS, TORCHRUN_QUEUES)]

    async def synced(self) -> None:
        """Wait until every required cache has its first list: forever if a CRD is missing."""
        for informer in self.informers.values():
            await informer.synced.wait()

    @property
    def problem(self) -> str:
        """Why the scope cannot be read."""
        problems = (informer.last_read.problem for informer in self.informers.values())
        return next(filter(None, problems), "its caches are not filled yet")


class Scopes(Mapping[str, Scope]):
    """The scopes by namespace; "" is the one of all namespaces."""

    def __init__(self, scopes: Mapping[str, Scope]) -> None:
        self._scopes = scopes
        self._listeners: list[Callable[[Scope], None]] = []
        # The namespaces without complete caches, while the controllers run.
        self.left_out: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Scope:
        return self._scopes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scopes)

    def __len__(self) -> int:
        return len(self._scopes)

    def of(self, namespace: str) -> Scope:
        """Return the scope that contains a namespace."""
        return self._scopes.get("") or self._scopes[namespace]

    def subscribe(self, listener: Callable[[Scope], None]) -> None:
        """Call `listener` with a scope that is no longer left out."""
        self._listeners.append(listener)

    def leave_out(self, namespaces: Iterable[str]) -> None:
        """Leave out these namespaces."""
        self.left_out = frozenset(namespaces)
        for name in sorted(self.left_out):
            log.warning("a namespace is left out", namespace=name, why=self[name].problem)

    def take_in(self, namespace: str) -> None:
        """Leave out a namespace no longer."""
        if namespace in self.left_out:
            log.info("a namespace is no longer left out", namespace=namespace)
            self.left_out -= {namespace}
            for listener in self._listeners:
                listener(self[namespace])

    def shortcoming(self) -> str:
        """Return the namespaces in which nothing is reconciled, and why; "" without any."""
        return "; ".join(
            f"nothing is reconciled in namespace {name}: {self[name].problem}"
            for name in self._unreadable()
        )

    def unsynced(self) -> Iterator[str]:
        """Each required cache without a list, and why; without the namespaces of `shortcoming`."""
        for name in sorted(self.keys() - self._unreadable()):
            for resource, informer in self[name].informers.items():
                if not informer.synced.is_set():
                    where = f" in namespace {name}" if name else ""
                    why = informer.last_read.problem or "waiting for the first list"
                    yield f"{resource}{where} ({why})"

    def _unreadable(self) -> list[str]:
        """The namespaces that are left out, or that the start of the controllers leaves out."""
        any_synced = any(scope.is_synced for scope in self.values())
        return [
            name
            for name, scope in self.items()
            if name in self.left_out or (any_synced and not scope.is_synced and scope.is_refused)
        ]
