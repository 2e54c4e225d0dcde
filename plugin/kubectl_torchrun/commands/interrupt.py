"""Ctrl-C while `run` follows: once asks, twice deletes."""

import time

from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.errors import DETACHED
from kubectl_torchrun.terminal import Terminal

ASK_SECONDS = 5.0


def ask(cluster: Cluster, name: str, terminal: Terminal, stopped: str) -> int:
    """Wait a moment for a second Ctrl-C, which deletes the job; else say `stopped`.

    The exit code is DETACHED in either case.
    """
    try:
        terminal.note(
            f"Ctrl-C again within {ASK_SECONDS:.0f} s deletes {name}; without it, you are detached."
        )
        time.sleep(ASK_SECONDS)
    except KeyboardInterrupt:
        terminal.interrupted()
    else:
        terminal.note(stopped)
        return DETACHED
    try:
        cluster.run(lambda api: api.delete(JOBS, name))
    except KeyboardInterrupt:
        terminal.interrupted()
        see = cluster.command(f"torchrun status {name}")
        terminal.note(f"Stopped while {name} was being deleted; see whether it is gone:\n  {see}")
        return DETACHED
    terminal.note(f"Deleted torchrunjob.torchrun.ai/{name}; its pods get their grace period.")
    return DETACHED
