"""The node's own copy of a workspace that a pod of the job serves, where no storage is shared.

Which pod that is, and what it has, the launcher is told at its start. A newer revision may be on
another pod: the annotations of its own pod name both.
"""

from __future__ import annotations

from . import podinfo
from .contract import SERVED_ANNOTATION
from .delivery import ReplacedError, Server, fetch
from .errors import LaunchError
from .output import wait_until

# For word of another server, where the one that is known of has no use any more.
_WORD_SECONDS = 10.0


class Served:
    """revision: the one that the copy is of, 0 before the first."""

    def __init__(self, first: Server, podinfo: str, target: str, seconds: float) -> None:
        self.revision = 0
        self._first = first
        self._podinfo = podinfo
        self._target = target
        self._seconds = seconds
        self._paths: set[str] = set()
        self._manifest = ""

    def newest(self) -> int:
        """Nobody but the controller tells of another one."""
        return self.revision

    def adopts(self, revision: int) -> bool:
        """Whether a newer revision is the same content, and is taken for it."""
        if self._told().manifest != self._manifest:
            return False
        self.revision = revision
        return True

    def take(self, revision: int = 0) -> None:
        """Fetch what is not here yet of what is told of by now. Raises LaunchError."""
        while True:
            server = self._told()
            try:
                self._fetch(server)
                break
            except ReplacedError:
                continue
            except LaunchError:
                if not self._is_replaced(server, _WORD_SECONDS):
                    raise
        self._manifest = server.manifest
        self.revision = revision

    def _fetch(self, server: Server) -> None:
        fetch(
            server, self._target, self._seconds, self._paths, lambda: self._is_replaced(server, 0.0)
        )

    def _is_replaced(self, server: Server, seconds: float) -> bool:
        return wait_until(lambda: self._told() != server, seconds, "word of another server")

    def _told(self) -> Server:
        url, _, manifest = podinfo.annotation(self._podinfo, SERVED_ANNOTATION).partition(" ")
        return Server(url, self._first.token, manifest) if manifest else self._first
