"""Newer code in a running pod: update the workspace and restart the command.

All nodes must change together. An annotation announces the revision to each pod, but not at the
same moment, so a node may lose its peers before it reads the annotation. If a command ends in that
time and the PVC has a newer revision, the pod does not end. Agents of two revisions never meet:
each revision has a separate rendezvous id and port.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import Iterator, Mapping

from . import contract
from .output import say, wait_until
from .podinfo import annotation, number
from .settings import read
from .supervise import STOPPING
from .workspace import WorkspaceCopy

# Between the publication of a revision on the PVC and the annotation of the controller.
_ANNOTATION_SECONDS = 30.0
# Longer than the controller needs for two patches of the annotation.
LATE_SECONDS = 6.0
_POLL = 0.05
_PORTS = 16


class Reload:
    """Detects a newer revision than the running one.

    podinfo: file of the pod's annotations. edit_wait: seconds for which a failed command keeps its
    pod in development mode. late: seconds after a failure during which an annotation may still
    announce newer code, if the PVC does not show it and peers may already run it.
    """

    def __init__(
        self, workspace: WorkspaceCopy, podinfo: str, edit_wait: float, late: float = 0.0
    ) -> None:
        self.workspace = workspace
        self._podinfo = podinfo
        self._edit_wait = edit_wait
        self._late = late

    def is_requested(self) -> bool:
        """Whether the controller wants a newer revision to run."""
        revision = number(self._podinfo, contract.REVISION_ANNOTATION)
        return revision > self.workspace.revision and not self.workspace.accept_unchanged(revision)

    def await_next(self, *, failed: bool) -> bool:
        """After the end of the command, wait for a newer revision; whether there is one."""
        if self.is_requested():
            return True
        with _interruptible():
            if self.workspace.newest_revision() > self.workspace.revision:
                return self._wait(
                    _ANNOTATION_SECONDS, "the controller to announce the newer revision to all pods"
                )
            if failed and annotation(self._podinfo, contract.DEVELOPMENT_ANNOTATION) == "true":
                say("development mode: the pod waits for the next edit")
                return self._wait(self._edit_wait, "the next edit: kubectl torchrun sync")
            return failed and self._wait(self._late, "an announcement of newer code")

    def update(self) -> None:
        """Copy the newer revision to the node. Raises LaunchError."""
        with _interruptible():
            self.workspace.update(number(self._podinfo, contract.REVISION_ANNOTATION))

    def _wait(self, seconds: float, what: str) -> bool:
        return wait_until(self.is_requested, seconds, what, pause=_POLL, longest_pause=_POLL)


def rendezvous(environment: Mapping[str, str], revision: int) -> dict[str, str]:
    """The environment with the rendezvous id and port of this revision.

    The first revision of the gang uses those of the pod.
    """
    changed = dict(environment)
    first = read(environment, contract.WORKSPACE_REVISION)
    later = revision - (int(first) if first.isdigit() else 1)
    if later <= 0:
        return changed
    if contract.PET_RDZV_ID in environment:
        changed[contract.PET_RDZV_ID] += f"-w{revision}"
    port = read(environment, contract.PET_MASTER_PORT)
    if not port.isdigit():
        return changed
    revision_port = str(int(port) + later % _PORTS)
    master = read(environment, contract.PET_MASTER_ADDR)
    if read(environment, contract.PET_RDZV_ENDPOINT) == f"{master}:{port}":
        changed[contract.PET_RDZV_ENDPOINT] = f"{master}:{revision_port}"
    changed[contract.PET_MASTER_PORT] = changed[contract.MASTER_PORT] = revision_port
    return changed


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a signal end the launcher at once, because no command runs that could handle it."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
