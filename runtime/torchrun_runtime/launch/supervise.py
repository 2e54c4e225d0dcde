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
from .processes import adopt_orphans, alive, descendants, foremost, programs, send, signal_name
from .streams import Streams

STOPPING = (signal.SIGTERM, signal.SIGINT)
_TAKEN = frozenset({signal.SIGCHLD, *STOPPING})
_IDLE = 1.0  # seconds between two looks without a signal, should one have been lost
_POLL = 0.1  # seconds between two looks while ranks end: they are not our children
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
        taken = signal.sigtimedwait(_TAKEN, _POLL if stop or verdict or reload else _IDLE)
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
    change that. It is therefore told last. For a reload it is not even asked.
    """

    def __init__(self, number: int, grace: float | None, *, for_reload: bool = False) -> None:
        self.number = number
        self.for_reload = for_reload
        self._deadline = None if grace is None else time.monotonic() + grace
        self._first = foremost(descendants(os.getpid()))
        self._rest_since: float | None = None
        names = ", ".join(f"{process.name}[{process.pid}]" for process in self._first)
        passed_on = (
            "newer code: SIGTERM sent" if for_reload else f"{signal_name(number)}: passed on"
        )
        say(f"{passed_on} to {names or 'nobody'}")
        send(self._first, number)

    def advance(self) -> None:
        """One look; never blocks."""
        now = time.monotonic()
        if self._rest_since is None:
            late = self._deadline is not None and now >= self._deadline
            if late:
                say("the time for a graceful end is over: killing what is left")
                send(descendants(os.getpid()), signal.SIGKILL)
            if late or not any(alive(process) for process in self._first):
                self._rest_since = now
                left = descendants(os.getpid())
                if self.for_reload:
                    send(left, signal.SIGKILL)
                else:
                    send(programs(left), signal.SIGTERM)
        elif now - self._rest_since > _AGENT_SECONDS:
            send(descendants(os.getpid()), signal.SIGKILL)


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
