"""What a node does before the ranks of a round start: names, newer code, free GPU memory.

This takes as long as the network and the storage need, so a thread does it. The main thread gives
the round up at once if the leader stops it: no rank of this node runs, and the leader would end the
gang because it waits for no ranks that do not stop in time.

The name of a headless Service appears with its pods, and a resolver caches a negative answer
(CoreDNS: 5 s). torchrun fails at once on an unknown host, so the launcher waits before it starts
torchrun. The first worker waits too: it must recognise itself by that name.
"""

from __future__ import annotations

import difflib
import glob
import os
import socket
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Callable, Mapping

from .cause import LaunchError
from .contract import NOT_FOUND
from .gang.messages import StartRound, StopRound
from .gpu_memory import GpuMemory
from .output import wait_until
from .reload import Reload
from .settings import LaunchSettings
from .threads import begin

_POLL = 0.05
# Variables that name folders of programs and packages.
_FOLDERS = ("VIRTUAL_ENV", "PATH", "CONDA_PREFIX", "PYTHONPATH")


class RoundPreparation:
    """Prepares the rounds of this node, one after the other. Create it before any rank runs."""

    def __init__(self, settings: LaunchSettings, script: str, reload: Reload) -> None:
        """script: of the command, from the working directory; "" if it is not known."""
        self._settings = settings
        self._script = script
        self._reload = reload
        self._has_names = False
        self._memory = GpuMemory()
        self._work: Future[None] = Future()
        self._work.set_result(None)

    def run(
        self, start: StartRound, stop_order: Callable[[], StopRound | None]
    ) -> StopRound | None:
        """Return once the ranks can start, or with the order that stops the round.

        The work for a stopped round goes on, and the next round waits for its end. The next round
        tries again what fails in the meantime. Raises LaunchError.
        """
        stop = self._await_work(stop_order)
        if stop is not None:
            return stop
        self._work = begin(lambda: self._prepare(start))
        stop = self._await_work(stop_order)
        if stop is None:
            self._work.result()
        return stop

    def _await_work(self, stop_order: Callable[[], StopRound | None]) -> StopRound | None:
        while not wait([self._work], _POLL).done:
            stop = stop_order()
            if stop is not None:
                return stop
        return None

    def _prepare(self, start: StartRound) -> None:
        settings = self._settings
        if not self._has_names:
            wait_for_names(settings.hosts, settings.resolve_wait)
            self._has_names = True
        self._reload.update(start)
        enter_directory(settings)
        _check_script(self._script)
        self._memory.await_free()


def _check_script(script: str) -> None:
    """Raise LaunchError (CommandNotFound) if the script is missing: no restart would find it."""
    if script and not os.path.exists(script):
        near = _find_near(script)
        hint = f" Did you mean {near}?" if near else ""
        message = f"The working directory {os.getcwd()} has no file {script}.{hint}"
        raise LaunchError("CommandNotFound", message, exit_code=NOT_FOUND)


def _find_near(script: str) -> str:
    """A script with a similar name, or in a folder below; "" for none."""
    folder, name = os.path.split(script)
    with suppress(OSError):
        names = [each for each in os.listdir(folder or ".") if each.endswith(".py")]
        for each in difflib.get_close_matches(name, names, 1):
            return os.path.join(folder, each)
        for each in sorted(glob.glob(os.path.join("*", name))):
            return each
    return ""


def describe_hidden(settings: LaunchSettings, environment: Mapping[str, str]) -> str:
    """What the workspace hides of the image, for the log; "" for nothing.

    An image may have its environment in the folder where the workspace is mounted.
    """
    target = settings.workspace_target
    if not settings.workspace_source or settings.workspace_source == target:
        return ""
    named = ((name, environment.get(name, "").split(os.pathsep)) for name in _FOLDERS)
    for name, folders in named:
        for folder in folders:
            if folder.startswith(f"{target}/") and not os.path.isdir(folder):
                return (
                    f"{name} names {folder}, which does not exist: the workspace at {target} hides"
                    " what the image has there. Set volumes.workspace.mountPath to another folder,"
                    " such as /workspace."
                )
    return ""


def enter_directory(settings: LaunchSettings) -> None:
    """Change to the command's directory: workingDir, else the workspace, if there is one.

    Raises LaunchError (WorkingDirMissing).
    """
    workspace = settings.workspace_target if settings.workspace_source else ""
    directory = settings.working_dir or workspace
    if not directory:
        return
    try:
        os.chdir(directory)
    except OSError as error:
        raise LaunchError(
            "WorkingDirMissing",
            f"Cannot enter the working directory {directory}: {error.strerror}. Set workingDir to a"
            " directory of the image, a volume or the workspace.",
        ) from error


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
