"""Waits until a cache is as new as the API server."""

from typing import Any

import anyio
import structlog

from torchrun_controller.cache.informer import Informer
from torchrun_controller.client import ApiError, Disconnected

# Seconds.
RETRY = 0.5
LONGEST_RETRY = 10.0
WARNING = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def wait_until_current(informer: Informer[Any]) -> None:
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
