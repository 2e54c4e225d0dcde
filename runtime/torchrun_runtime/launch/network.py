"""Wait for the DNS name of the master.

The name of a headless Service appears with its pods, and a resolver caches a negative answer
(CoreDNS: 5 s). torchrun fails at once on an unknown host, so the launcher waits before it starts
torchrun. The first worker waits too: it must recognise itself by that name.
"""

from __future__ import annotations

import socket
from functools import partial

from .errors import LaunchError
from .output import wait_until


def wait_for_names(hosts: tuple[str, ...], seconds: float) -> None:
    """Return when every name resolves. Raises LaunchError (MasterNotResolved) after `seconds`."""
    for host in hosts:
        if not wait_until(partial(_resolves, host), seconds, f"the DNS name {host}"):
            raise LaunchError(
                "MasterNotResolved",
                f"The DNS name {host} did not resolve within {seconds:.0f} s. Check that the"
                " headless Service of the job exists and that DNS works in this pod.",
            )


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False
