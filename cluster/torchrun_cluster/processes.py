"""A cluster's processes, known by a mark in their environment rather than by remembered pids.

Every process of a cluster is started with the cluster's state folder and its component's name in
its environment, and children (containerd's shims) inherit both. So nothing has to be written down
when a process starts, a crash at any point loses none of them, and a recycled pid is never taken
for one of ours. Signals go through a pidfd opened before the mark is read, so the process that is
signalled is the process that was looked at.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import pidfd
from .errors import ClusterError

OWNER = "TORCHRUN_CLUSTER_STATE"
COMPONENT = "TORCHRUN_CLUSTER_COMPONENT"
SHIM = "containerd-shim"
PROC = Path("/proc")
# A process shows no environment during its exec, which takes seconds where the disk is busy.
EXEC_SECONDS = 5.0


@dataclass(frozen=True)
class Marked:
    """A live process that carries a cluster's mark; pid as seen from the caller's namespace."""

    pid: int
    owner: str
    component: str


def start(
    owner: Path,
    component: str,
    command: Sequence[str],
    log: Path,
    inside: Sequence[str] = (),
) -> None:
    """Start a daemon of the cluster `owner`; its output is appended to `log`.

    `inside` is a command that enters namespaces and runs the rest of its arguments there. The
    daemon is no child of the caller, so nobody has to reap it. Raises ClusterError when the
    program cannot be started at all.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, OWNER: str(owner), COMPONENT: component}
    with log.open("ab") as output:
        result = subprocess.run(
            [*inside, "setsid", "--fork", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            check=False,
        )
    if result.returncode:
        raise ClusterError(f"cannot start {component}: {tail(log)}")


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command in the foreground, and return its exit code; `environment`: default, ours.

    Ctrl-C reaches the command, too. Its end is awaited, so that it can end what it has started:
    subprocess.run would kill it after a quarter of a second.

    Raises:
        KeyboardInterrupt: after the command has ended.
    """
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def read_mark(environ: bytes) -> tuple[str, str] | None:
    """Owner and component named in the content of a /proc/PID/environ, if it has both."""
    values: dict[str, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.decode(errors="replace").partition("=")
        values.setdefault(name, value)
    if OWNER not in values or COMPONENT not in values:
        return None
    return values[OWNER], values[COMPONENT]


def look_at(pid: int, proc: Path = PROC) -> Marked | None:
    """The process, if it is alive (not a zombie), ours to read, and carries a mark."""
    try:
        # A zombie's environment is empty, so it carries no mark.
        mark = read_mark((proc / str(pid) / "environ").read_bytes())
        if not mark:
            return None
        owner, component = mark
        # Pods outlive a restart of containerd, so their shims are no part of it.
        if (proc / str(pid) / "comm").read_text().startswith(SHIM):
            component = SHIM
    except OSError:
        return None
    return Marked(pid, owner, component)


def of_cluster(owner: Path, component: str | None = None) -> list[Marked]:
    """The live processes of a cluster, or of one component of it."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal())
    candidates = (look_at(pid) for pid in pids)
    return [
        process
        for process in candidates
        if process
        and process.owner == str(owner)
        and (component is None or process.component == component)
    ]


def alive_check(
    owner: Path, components: Sequence[str], log: Callable[[str], Path]
) -> Callable[[], None]:
    """A check to call repeatedly: it raises ClusterError once a component has ended.

    A component counts as ended if no process of it shows for EXEC_SECONDS.
    """
    last_seen = dict.fromkeys(components, time.monotonic())

    def check() -> None:
        now, alive = time.monotonic(), {process.component for process in of_cluster(owner)}
        for component in components:
            if component in alive:
                last_seen[component] = now
            elif now - last_seen[component] > EXEC_SECONDS:
                path = log(component)
                raise ClusterError(f"{component} ended; {path} ends with:\n{tail(path)}")

    return check


def end(
    owner: Path,
    component: str | None = None,
    number: signal.Signals = signal.SIGKILL,
    timeout: float = 60.0,
) -> None:
    """Signal the processes of a cluster (or of one component) and wait until they are gone.

    Processes that start meanwhile are ended too. After `timeout` seconds whatever is left is
    killed. Raises ClusterError when even that does not end them within ten seconds more.
    """
    deadline = time.monotonic() + timeout
    while processes := of_cluster(owner, component) or _look_again(owner, component):
        if time.monotonic() > deadline + 10:
            pids = ", ".join(f"{process.component} (pid {process.pid})" for process in processes)
            raise ClusterError(f"these processes do not stop: {pids}; see `ps -o pid,stat,wchan`")
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        end_these(processes, number, deadline)


def _look_again(owner: Path, component: str | None) -> list[Marked]:
    """The processes that a look just before has missed during their exec."""
    time.sleep(0.1)
    return of_cluster(owner, component)


def end_these(processes: Sequence[Marked], number: signal.Signals, deadline: float) -> None:
    """Signal exactly these processes, and wait for their end until `deadline` (monotonic).

    One that has ended, and whose pid may be somebody else's by now, is left alone.
    """
    handles: list[int] = []
    try:
        for process in processes:
            try:
                handle = pidfd.open_pid(process.pid)
            except ProcessLookupError:
                continue
            if look_at(process.pid) == process:
                handles.append(handle)
                _signal(handle, number)
            else:
                os.close(handle)
        for handle in handles:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll(max(100, (deadline - time.monotonic()) * 1000))
    finally:
        for handle in handles:
            os.close(handle)


def _signal(handle: int, number: signal.Signals) -> None:
    try:
        pidfd.send_signal(handle, number)
    except ProcessLookupError:
        return


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return f"(no log at {log})"


def without_marks(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for commands that act on a cluster but are no part of it."""
    return {name: value for name, value in environment.items() if name not in (OWNER, COMPONENT)}
