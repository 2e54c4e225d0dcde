"""When controllers may start: their caches are filled, and as new as the API server."""

from typing import Any

import anyio
import structlog

from torchrun_controller.cache.informer import Informer
from torchrun_controller.cache.scopes import Scope, Scopes
from torchrun_controller.client import ApiError, Disconnected

# Seconds.
RETRY = 0.5
LONGEST_RETRY = 10.0
WARNING = 5.0
REFUSED_CHECK = 1.0  # between two checks of which namespaces cannot be read

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class CatchUp:
    """The scopes whose caches are filled and current. `elected` is set once the process leads."""

    def __init__(self, scopes: Scopes, elected: anyio.Event) -> None:
        self._scopes = scopes
        self._elected = elected
        self._caught_up: set[str] = set()
        self._changed = anyio.Event()

    async def follow(self, name: str, scope: Scope, has_predecessor: bool) -> None:
        """Wait until the caches of a scope are filled and current; take it in if it was left out.

        The process leads then.
        """
        await scope.synced()
        await self._elected.wait()
        if has_predecessor:
            for informer in scope.status_informers:
                await _wait_until_current(informer)
        self._caught_up.add(name)
        self._changed.set()
        self._changed = anyio.Event()
        self._scopes.take_in(name)

    async def wait_until_ready(self) -> None:
        """Wait until controllers may start, see `_is_ready`."""
        while not self._is_ready:
            with anyio.move_on_after(REFUSED_CHECK):
                await self._changed.wait()

    def leave_out_others(self) -> None:
        """Leave out the scopes that have not caught up."""
        self._scopes.leave_out(self._scopes.keys() - self._caught_up)

    @property
    def _is_ready(self) -> bool:
        """Whether the caches of a namespace are current, and the controller may not read others."""
        others = (scope for name, scope in self._scopes.items() if name not in self._caught_up)
        return bool(self._caught_up) and all(scope.is_refused for scope in others)


async def _wait_until_current(informer: Informer[Any]) -> None:
    """Wait until the cache is as new as the server: it includes the previous leader's writes.

    A watch may lag by up to 90 s if its connection is dead. An admission decision from an older
    state would use the same quota twice. All other writes are safe with a stale cache: their name,
    UID or resourceVersion prevents a repetition.
    """
    delay, last_error = RETRY, ""
    while True:
        try:
            newest = await informer.newest()
            break
        except (ApiError, Disconnected) as error:
            if str(error) != last_error:
                last_error = str(error)
                log.warning("cannot determine whether a cache is current", error=last_error)
            await anyio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY)
    while not await informer.wait_for(newest, WARNING):
        log.warning("waiting for a stale cache", resource=informer.kind.resource)
