"""Running the command: wait for it, pass signals on in the right order, leave nothing behind.

Signals are never handled, they are waited for: all of them are blocked and taken one by one, so
that no code runs between two others. The command itself is started with none blocked.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Callable, Mapping, NamedTuple, Protocol, Sequence

from .errors import LaunchError
from .output import say
from .processes import (
    Process,
    adopt_orphans,
    agents,
    alive,
    catches,
    descendants,
    foremost,
    programs,
    send,
    signal_name,
    trapping,
)
from .streams import Streams

STOPPING = (signal.SIGTERM, signal.SIGINT)
_TAKEN = frozenset({signal.SIGCHLD, *STOPPING})
_IDLE = 1.0  # seconds between two looks without a signal, should one have been lost
_POLL = 0.1  # seconds between two looks for a reload, or while killed processes go
# The same while ranks end: they are not our children. Their agent looks every 0.1 s, and must not
# be the first to see one fail while another saves.
_POLL_RANKS = 0.005
_CLEAR_SECONDS = 2.0
RELOAD_GRACE = 5.0  # seconds that ranks have to end before newer code
_AGENT_SECONDS = 10.0  # for torchrun to end once its ranks are gone


class Verdict(NamedTuple):
    """Why the launcher itself ends the command at once. exit_code: the container's own."""

    exit_code: int
    reason: str
    message: str


class Watch(Protocol):
    """Looks after the command beside it; neither method may take longer than seconds."""

    def look(self) -> Verdict | None:
        """Called about every second while nobody has told the command to end."""

    def stopping(self) -> None:
        """The pod is told to end; called before the ranks are."""


class Ended(NamedTuple):
    """How the command ended.

    stopped_by: the signal that was passed on, None if there was none. verdict: of a watch.
    for_reload: it was ended to be started again.
    """

    exit_code: int
    signal: int | None
    stopped_by: int | None
    verdict: Verdict | None = None
    for_reload: bool = False


def supervise(
    argv: list[str],
    environment: Mapping[str, str],
    grace: float | None,
    watches: Sequence[Watch] = (),
    streams: Streams | None = None,
    reload: Callable[[], bool] | None = None,
) -> Ended:
    """Run `argv` to its end.

    grace: seconds that the ranks may take to end after SIGTERM, None for as long as the kubelet
    lets them. streams: what becomes of its output, None for the launcher's own. reload: asked ten
    times a second whether to end it for a reload. Raises LaunchError (CommandNotFound,
    CommandNotExecutable).
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    child = _start(argv, environment, streams)
    stop: _Stop | None = None
    verdict: Verdict | None = None
    looked = time.monotonic()
    while True:
        pause = _POLL_RANKS if stop else _POLL if verdict or reload else _IDLE
        taken = signal.sigtimedwait(_TAKEN, pause)
        free = verdict is None and (stop is None or stop.for_reload)
        if taken is not None and taken.si_signo in STOPPING and free:
            for watch in watches:
                watch.stopping()
            stop = _Stop(taken.si_signo, grace)
        status = _reap(child)
        if status is not None:
            break
        if stop:
            stop.advance()
        elif reload and reload():
            stop = _Stop(signal.SIGTERM, min(grace or RELOAD_GRACE, RELOAD_GRACE), for_reload=True)
        elif verdict is None and time.monotonic() - looked >= _IDLE - _POLL:
            looked = time.monotonic()
            verdict = _first_verdict(watches)
        if verdict:
            # Parents before children: an agent must not see its ranks end and start them again.
            send(descendants(os.getpid()), signal.SIGKILL)
    _clear()
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if number is None else 128 + number
    for_reload = stop is not None and stop.for_reload
    stopped_by = stop.number if stop and not for_reload else None
    return Ended(code, number, stopped_by, verdict, for_reload)


def _first_verdict(watches: Sequence[Watch]) -> Verdict | None:
    for watch in watches:
        verdict = watch.look()
        if verdict:
            say(f"killing the command: {verdict.message}")
            return verdict
    return None


class _Stop:
    """First the ranks, which may want to write a checkpoint; the rest when they are gone.

    torchrun kills its ranks 30 s after a SIGTERM of its own, in old releases with no way to
    change that. It is therefore told last. It does the same where one of its ranks dies of the
    signal while another still saves, so it is halted (SIGSTOP) for that time: neither a second
    SIGTERM nor a SIGKILL of its own meets a rank that saves. For a reload it is not even asked.
    """

    def __init__(self, number: int, grace: float | None, *, for_reload: bool = False) -> None:
        self.number = number
        self.for_reload = for_reload
        self._deadline = None if grace is None else time.monotonic() + grace
        tree = descendants(os.getpid())
        self._first = foremost(tree, number)
        self._agents = [] if for_reload else agents(tree)
        self._halted = False
        self._rest: list[Process] = []
        self._rest_since: float | None = None
        names = ", ".join(f"{process.name}[{process.pid}]" for process in self._first)
        passed_on = (
            "newer code: SIGTERM sent" if for_reload else f"{signal_name(number)}: passed on"
        )
        say(f"{passed_on} to {names or 'nobody'}")
        saving = [process for process in self._first if catches(process, number)]
        if 0 < len(saving) < len(self._first):
            self._halt()
        send(self._first, number)

    def advance(self) -> None:
        """One look; never blocks."""
        if self._rest_since is None:
            self._await_first()
        elif self._is_late():
            send(descendants(os.getpid()), signal.SIGKILL)
        elif time.monotonic() - self._rest_since > _AGENT_SECONDS:
            self._end_rest()

    def _await_first(self) -> None:
        left = [process for process in self._first if alive(process)]
        if self._is_late():
            say("the time for a graceful end is over: killing what is left")
            send(descendants(os.getpid()), signal.SIGKILL)
        elif left:
            if len(left) < len(self._first):
                self._halt()
            return
        self._rest_since = time.monotonic()
        tree = descendants(os.getpid())
        if self.for_reload:
            send(tree, signal.SIGKILL)
            return
        shells = [shell for shell in trapping(tree, signal.SIGTERM) if shell not in self._first]
        self._rest = [*programs(tree), *shells]
        send(self._rest, signal.SIGTERM)
        send(self._agents if self._halted else [], signal.SIGCONT)

    def _end_rest(self) -> None:
        """Kill what does not end, but for shells in their traps and what those run."""
        left = descendants(os.getpid())
        shells = trapping(left, signal.SIGTERM)
        kept = shells if self._rest else []
        send([p for p in (self._rest if kept else left) if p not in kept], signal.SIGKILL)

    def _halt(self) -> None:
        if self._agents and not self._halted:
            self._halted = True
            send(self._agents, signal.SIGSTOP)

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


def _start(argv: list[str], environment: Mapping[str, str], streams: Streams | None) -> int:
    """Start the command and return its pid; Python's own signal dispositions are undone."""
    ends = streams.ends.items() if streams else ()
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, end, stream) for stream, end in ends],
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, *_TAKEN),
        )
    except FileNotFoundError as error:
        message = f"{argv[0]} is not in this image (PATH: {environment.get('PATH', '')})"
        raise LaunchError("CommandNotFound", message, exit_code=127) from error
    except OSError as error:
        message = f"{argv[0]} cannot be started: {error.strerror}"
        raise LaunchError("CommandNotExecutable", message, exit_code=126) from error
    finally:
        if streams:
            streams.started()


def _clear() -> None:
    """Kill what the command left, and take its exits; bounded, as the kernel may hold one back."""
    end = time.monotonic() + _CLEAR_SECONDS
    while time.monotonic() < end:
        left = descendants(os.getpid())
        if not left:
            break
        send(left, signal.SIGKILL)
        signal.sigtimedwait(_TAKEN, _POLL)
        _reap(0)


def _reap(child: int) -> int | None:
    """Take the exit of every ended child, ours or adopted; return `child`'s own if it ended."""
    ended = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                ended = status
    return ended
