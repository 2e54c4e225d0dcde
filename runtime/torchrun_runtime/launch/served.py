"""The node's copy of the workspace from a serve pod of the job, for jobs without shared storage.

The environment has the URL of the serve pod and its manifest. A newer revision may be on another
serve pod: an annotation of the worker then has its URL and manifest, and so has the leader's order.
"""

from __future__ import annotations

from . import podinfo
from .contract import REVISION_ANNOTATION, SERVED_ANNOTATION
from .delivery import ReplacedError, Server, fetch
from .errors import LaunchError
from .manifest import Entry
from .output import wait_until

# Wait for the annotation with another server, after the current one has failed.
_ANNOTATION_SECONDS = 10.0


class ServedWorkspace:
    """A WorkspaceCopy of the workspace of a serve pod."""

    def __init__(self, first: Server, podinfo: str, target: str, seconds: float) -> None:
        self.revision = 0
        self._first = first
        self._podinfo = podinfo
        self._target = target
        self._seconds = seconds
        self._copied: dict[str, Entry] = {}
        self._manifest = ""
        self._ordered = (0, "")  # revision and address in the order of the leader

    def newest_revision(self) -> int:
        """The current one: only the controller announces another."""
        return self.revision

    def accept_unchanged(self, revision: int, served: str = "") -> bool:
        """Set the current revision to the announced one if it has the same manifest."""
        self._order(revision, served)
        announced, server = self._announced()
        if server.manifest != self._manifest:
            return False
        self.revision = max(revision, announced)
        return True

    def update(self, revision: int = 0, served: str = "") -> None:
        """Fetch the differences to the announced manifest. Raises LaunchError.

        The revision of the copy is then the announced one, which may be newer than `revision`.
        """
        self._order(revision, served)
        while True:
            announced, server = self._announced()
            try:
                self._fetch(server)
                break
            except ReplacedError:
                continue
            except LaunchError:
                if not self._is_replaced(server, _ANNOTATION_SECONDS):
                    raise
        self._manifest = server.manifest
        self.revision = max(revision, announced)

    def _fetch(self, server: Server) -> None:
        fetch(
            server,
            self._target,
            self._seconds,
            self._copied,
            lambda: self._is_replaced(server, 0.0),
        )

    def _is_replaced(self, server: Server, seconds: float) -> bool:
        return wait_until(
            lambda: self._announced()[1] != server, seconds, "the address of another serve pod"
        )

    def _order(self, revision: int, served: str) -> None:
        if served:
            self._ordered = revision, served

    def _announced(self) -> tuple[int, Server]:
        """The newest revision and its server, from the annotation or from the order."""
        revision, served = self._ordered
        values = podinfo.values(self._podinfo)
        annotated = podinfo.to_number(values.get(REVISION_ANNOTATION, ""))
        if annotated >= revision:
            revision, served = annotated, values.get(SERVED_ANNOTATION, "")
        url, _, manifest = served.partition(" ")
        return revision, Server(url, self._first.token, manifest) if manifest else self._first
