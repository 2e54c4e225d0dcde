"""Edits brought into a running pod: another revision of the workspace, the command started anew.

All nodes have to change together. Each is told by the annotation of its pod, a moment after or
before the others, and so may see its peers go before it is told. What ends meanwhile is therefore
no end where the claim holds a newer revision already. Old and new agents never meet: each revision
has a rendezvous and a port of its own.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import Iterator, Mapping

from . import contract
from .output import say, wait_until
from .podinfo import annotation, number
from .served import Served
from .settings import read
from .supervise import STOPPING
from .workspace import Workspace

# From a revision that is whole on the claim to the word of the controller.
_WORD_SECONDS = 30.0
# Longer than the controller takes to say it twice.
LATE_SECONDS = 6.0
_POLL = 0.05
_PORTS = 16


class Reload:
    """Watches for a newer revision than the one that runs.

    podinfo: file of the pod's annotations. edit_wait: seconds for which a command that has failed
    in development mode keeps its pod. late: how long after a failure word of newer code may come,
    where nothing else tells of it and peers may have begun with it.
    """

    def __init__(
        self, workspace: Workspace | Served, podinfo: str, edit_wait: float, late: float = 0.0
    ) -> None:
        self.workspace = workspace
        self._podinfo = podinfo
        self._edit_wait = edit_wait
        self._late = late

    def asked(self) -> bool:
        """Whether the controller wants a newer revision to run."""
        told = number(self._podinfo, contract.REVISION_ANNOTATION)
        return told > self.workspace.revision and not self.workspace.adopts(told)

    def follows(self, *, failed: bool) -> bool:
        """Whether the command, which has ended, is to run again with a newer revision."""
        if self.asked():
            return True
        with _interruptible():
            if self.workspace.newest() > self.workspace.revision:
                return self._wait(_WORD_SECONDS, "the go-ahead for the newer revision")
            if failed and annotation(self._podinfo, contract.DEVELOPMENT_ANNOTATION) == "true":
                say("development: the pod is kept and waits for the next edit")
                return self._wait(self._edit_wait, "the next edit: kubectl torchrun sync")
            return failed and self._wait(self._late, "word of newer code")

    def take(self) -> None:
        """Bring the newer revision into the node's copy. Raises LaunchError."""
        with _interruptible():
            self.workspace.take(number(self._podinfo, contract.REVISION_ANNOTATION))

    def _wait(self, seconds: float, what: str) -> bool:
        return wait_until(self.asked, seconds, what, pause=_POLL, longest_pause=_POLL)


def rendezvous(environment: Mapping[str, str], revision: int) -> dict[str, str]:
    """The environment with the rendezvous of this revision: an id and a port of its own.

    Those of the revision that the gang began with are as the pod has them.
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
    own = str(int(port) + later % _PORTS)
    master = read(environment, contract.PET_MASTER_ADDR)
    if read(environment, contract.PET_RDZV_ENDPOINT) == f"{master}:{port}":
        changed[contract.PET_RDZV_ENDPOINT] = f"{master}:{own}"
    changed[contract.PET_MASTER_PORT] = changed[contract.MASTER_PORT] = own
    return changed


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a signal end the launcher at once: no command runs that it would have to be passed to."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
