"""Newer code in a running pod: the next round runs it on all nodes.

An annotation of the leader's pod announces a revision of the workspace. The leader ends the present
round, and every node updates its copy of the workspace before it starts the next one.
"""

from __future__ import annotations

import threading

from . import contract
from .gang.leader import STOP_SECONDS
from .gang.messages import RoundCode, StartRound
from .gang.rounds import OwnLink
from .output import say, wait_until
from .podinfo import annotation, number
from .supervise import is_stopping
from .workspace import WorkspaceCopy

# Between the publication of a revision on the PVC and the annotation of the controller. The leader
# reports its own failure after that, in time if another node has failed as well.
_ANNOTATION_SECONDS = STOP_SECONDS - 10.0
_POLL = 0.05


class Reload:
    """Follows the revisions of the workspace.

    podinfo: file of the pod's annotations. edit_wait: seconds for which a failed round waits for an
    edit in development mode.
    """

    def __init__(self, workspace: WorkspaceCopy | None, podinfo: str, edit_wait: float) -> None:
        self._workspace = workspace
        self._podinfo = podinfo
        self._edit_wait = edit_wait
        # The leader starts a round for a newer revision than this one.
        self._revision = workspace.revision if workspace else 0
        self._announced: tuple[RoundCode, float] | None = None
        self._is_complete = True  # False from the start of an update to its success
        self._lock = threading.Lock()  # of revision and copy: a thread may update them

    def announce(self, link: OwnLink) -> None:
        """Tell the leader the newest revision, and whether a failed round waits for an edit.

        Does nothing during an update.
        """
        if self._workspace is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._revision = max(self._revision, self._newest_announced())
        finally:
            self._lock.release()
        is_developed = annotation(self._podinfo, contract.DEVELOPMENT_ANNOTATION) == "true"
        served = annotation(self._podinfo, contract.SERVED_ANNOTATION)
        announced = RoundCode(self._revision, served), self._edit_wait if is_developed else 0.0
        if announced != self._announced:
            self._announced = announced
            link.announce(*announced)

    def await_announcement(self) -> None:
        """Wait until the controller announces a revision that the PVC already has."""
        workspace = self._workspace
        if workspace is not None and workspace.newest_revision() > workspace.revision:
            wait_until(
                lambda: is_stopping() or self._newest_announced() > workspace.revision,
                _ANNOTATION_SECONDS,
                "the controller to announce the newer revision",
                pause=_POLL,
                longest_pause=_POLL,
            )

    def update(self, start: StartRound) -> None:
        """Copy the code of a round to the node, if it is newer. Raises LaunchError.

        The copy may be newer than the order, if that revision is gone. The leader then announces
        its own, so that no other node goes on with the ordered one.
        """
        with self._lock:
            workspace = self._workspace
            revision, served = start.code
            if workspace is None or (self._is_complete and revision <= workspace.revision):
                return
            if not (self._is_complete and workspace.accept_unchanged(revision, served)):
                self._is_complete = False
                workspace.update(revision, served)
                self._is_complete = True
                say(f"round {start.round} runs revision {workspace.revision}")
            self._revision = max(self._revision, workspace.revision)

    def _newest_announced(self) -> int:
        """The announced revision, 0 if it is the one that runs."""
        workspace = self._workspace
        revision = number(self._podinfo, contract.REVISION_ANNOTATION)
        if workspace is None or revision <= workspace.revision:
            return 0
        # Other nodes may already have code that this node has announced and does not have yet.
        is_code_of_all = self._revision <= workspace.revision
        return 0 if is_code_of_all and workspace.accept_unchanged(revision) else revision
