"""Run the command: wait for it, forward signals in the right order, kill remaining processes.

There are no signal handlers. All signals are blocked, and sigtimedwait returns them one by one, so
that no handler interrupts other code. The command itself starts with no signal blocked, in a
separate process group: a script may end with `kill 0`, which is not a stop by Kubernetes. If there
is a terminal, it belongs to that group while the command runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from typing import Callable, Mapping, NamedTuple, Protocol, Sequence

from .cause import LaunchError
from .contract import NOT_EXECUTABLE, NOT_FOUND
from .graceful import GracefulStop
from .output import say
from .processes import adopt_orphans, descendants, is_below, send, signal_name
from .streams import Streams

STOPPING = (signal.SIGTERM, signal.SIGINT)
_CHILD_SIGNALS = frozenset({signal.SIGCHLD})
_HANDLED_SIGNALS = frozenset({*_CHILD_SIGNALS, *STOPPING})
# Those that a command gets with their default dispositions, which Python and this module change.
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, *_HANDLED_SIGNALS)
_IDLE = 1.0  # seconds between two looks without a signal, should one have been lost
_POLL = 0.1  # seconds between two checks for the end of a round, or while killed processes end
# Poll interval while ranks end. They are not children of the launcher. Their agent polls every
# 0.1 s, and must not be the first to see that one rank fails while another saves.
_POLL_RANKS = 0.005
# For killed processes to end. The kernel may need many seconds to free memory and GPU contexts. The
# leader of the gang waits for 30 s (gang.leader.STOP_SECONDS), with the grace period of a round.
_CLEAR_SECONDS = 24.0
_CLEAR_SECONDS_OF_STOP = 2.0  # in the grace period of the pod, which soon ends the launcher


def is_stopping() -> bool:
    """Whether a signal is pending that asks this process to end, while it is blocked."""
    return not signal.sigpending().isdisjoint(STOPPING)


class StopRequest(NamedTuple):
    """The reason why a watchdog ends the command at once. exit_code: of the container."""

    exit_code: int
    reason: str
    message: str


class Watchdog(Protocol):
    """A check during the command. No method may block for more than a few seconds."""

    def check(self) -> StopRequest | None:
        """Called about every second until the command is asked to end."""

    def on_stop(self, *, leaving: bool) -> None:
        """Called before a signal reaches the ranks. leaving: the pod is asked to end."""


class PlannedEnd(NamedTuple):
    """How the command is to end. signals: by the signal that was held back, or else by itself.

    seconds: until it is killed; None: the kubelet does that.
    """

    signals: bool
    seconds: float | None


class Planned(Protocol):
    """An agreement of all ranks to end, instead of a signal."""

    @property
    def is_urgent(self) -> bool:
        """Whether to call `look` again within milliseconds."""

    def hold(self, number: int) -> bool:
        """Whether a signal that asks the pod to end is held back."""

    def look(self) -> PlannedEnd | None:
        """Called after each signal and ten times a second: how to end the command; None: not."""

    def have_been_told(self) -> bool:
        """Whether a rank of this node knows that it is to end."""


class CommandExit(NamedTuple):
    """How the command ended.

    signal: the one that ended it, or None. stopped_by: the signal that the launcher forwarded, or
    None. stop_request: of a watchdog. for_next_round: the launcher ended it for another start.
    has_survivors: processes of the command still exist, because the kernel blocks them. is_leaving:
    the pod is asked to end, or that of another node and all ranks have agreed on it.
    """

    exit_code: int
    signal: int | None
    stopped_by: int | None
    stop_request: StopRequest | None
    for_next_round: bool
    has_survivors: bool
    is_leaving: bool = False


class Standby(Protocol):
    """A process that may run a command instead of a new one."""

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], ends: Mapping[int, int]
    ) -> int | None:
        """Run the command; its pid, or None if a new process is needed.

        ends: descriptors of stdout and stderr of the command, by number.
        """


class SupervisedCommand(NamedTuple):
    """What to run. streams: of its output; None: those of the launcher. standby: may run it."""

    argv: list[str]
    environment: Mapping[str, str]
    streams: Streams | None = None
    standby: Standby | None = None


def supervise(
    command: SupervisedCommand,
    grace: float | None,
    watchdogs: Sequence[Watchdog] = (),
    end_of_round: Callable[[], float | None] | None = None,
    on_success: Callable[[], None] | None = None,
    planned: Planned | None = None,
    observe: Callable[[], None] | None = None,
) -> CommandExit:
    """Run a command to its end.

    grace: seconds that the ranks have to end after SIGTERM; None: the grace period of the kubelet.
    end_of_round: called after each signal and ten times a second, returns the grace period with
    which to end the command for the next round, None to go on. on_success: called once the command
    has ended with 0, before what it has left is killed. planned: may hold back a signal, and end
    the command by agreement. observe: called about every second until the end, also while the
    command is asked to end. Raises LaunchError (CommandNotFound, CommandNotExecutable).

    By priority: a stop in progress, or the request of a watchdog, then the end of the round.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    child = _start(command)
    end = _await_end(child, grace, watchdogs, end_of_round, planned, observe)
    if on_success and not (end.status or end.stop or end.stop_request):
        on_success()
    _take_terminal(os.getpgrp(), child)
    if end.held and end.stop is None:
        _announce(watchdogs, leaving=True)
    has_survivors = not _clear(_CLEAR_SECONDS_OF_STOP if end.is_leaving else _CLEAR_SECONDS)
    return _command_exit(end, has_survivors)


class _End(NamedTuple):
    """How a command has ended. status: of waitpid(2). held: the signal that was held back, or 0."""

    status: int
    stop: GracefulStop | None
    stop_request: StopRequest | None
    held: int

    @property
    def is_leaving(self) -> bool:
        return bool(self.held) or (self.stop is not None and not self.stop.for_next_round)


def _await_end(
    child: int,
    grace: float | None,
    watchdogs: Sequence[Watchdog],
    end_of_round: Callable[[], float | None] | None,
    planned: Planned | None,
    observe: Callable[[], None] | None,
) -> _End:
    """Wait until the command has ended, and end it when a signal or a part of the launcher asks."""
    stop: GracefulStop | None = None
    held = 0  # the signal that waits for an agreement
    stop_request: StopRequest | None = None
    status: int | None = None
    last_check = time.monotonic()
    while True:
        # A signal that ends the pod stays pending while the command is killed: the caller sees it.
        signals = _HANDLED_SIGNALS if stop_request is None else _CHILD_SIGNALS
        is_urgent = stop is not None or (planned is not None and planned.is_urgent)
        number = _stop_signal(_pause(is_urgent, stop_request, end_of_round), signals)
        if number and stop is None and planned and (held or planned.hold(number)):
            held = held or number
        elif number and (stop is None or stop.for_next_round):
            _announce(watchdogs, leaving=True)
            stop = GracefulStop(number, grace)
        if stop is None and stop_request is None and planned and (end := planned.look()):
            _announce(watchdogs, leaving=True)
            told = None if end.signals else planned.have_been_told
            stop = GracefulStop(held or signal.SIGTERM, end.seconds, have_been_told=told)
        ended = _reap(child)
        status = ended if status is None else status
        if status is not None and not (stop and stop.awaits_orphans()):
            return _End(status, stop, stop_request, held)
        is_due = time.monotonic() - last_check >= _IDLE - _POLL
        if is_due:
            last_check = time.monotonic()
            if observe:
                observe()
        if stop:
            stop.advance()
        elif stop_request is None and end_of_round and (round_grace := end_of_round()) is not None:
            _announce(watchdogs, leaving=False)
            stop = GracefulStop(signal.SIGTERM, round_grace, for_next_round=True)
        elif stop_request is None and is_due:
            stop_request = _first_stop_request(watchdogs)
        if stop_request:
            # Parents before children: an agent must not see its ranks end and start them again.
            send(descendants(os.getpid()), signal.SIGKILL)


def _announce(watchdogs: Sequence[Watchdog], *, leaving: bool) -> None:
    """Tell the watchdogs that the command ends. leaving: no other round follows."""
    for watchdog in watchdogs:
        watchdog.on_stop(leaving=leaving)


def _pause(
    is_urgent: bool,
    stop_request: StopRequest | None,
    end_of_round: Callable[[], float | None] | None,
) -> float:
    """Seconds to wait for a signal before the next check."""
    if is_urgent:
        return _POLL_RANKS
    return _POLL if stop_request or end_of_round else _IDLE


def _stop_signal(seconds: float, signals: frozenset[signal.Signals]) -> int:
    """Wait for a signal; its number if it is in STOPPING, 0 for any other or none.

    One that the command itself has sent, for example with `pkill python`, is none.
    """
    received = signal.sigtimedwait(signals, seconds)
    if received is None or received.si_signo not in STOPPING:
        return 0
    if is_below(received.si_pid, os.getpid()):
        name = signal_name(received.si_signo)
        say(f"ignoring {name} from process {received.si_pid} of the command")
        return 0
    return received.si_signo


def _command_exit(end: _End, has_survivors: bool) -> CommandExit:
    status, stop = end.status, end.stop
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    for_next_round = stop is not None and stop.for_next_round
    return CommandExit(
        exit_code=os.WEXITSTATUS(status) if number is None else 128 + number,
        signal=number,
        stopped_by=stop.number if stop and stop.has_signalled and not for_next_round else None,
        stop_request=end.stop_request,
        for_next_round=for_next_round,
        has_survivors=has_survivors,
        is_leaving=end.is_leaving,
    )


def _first_stop_request(watchdogs: Sequence[Watchdog]) -> StopRequest | None:
    for watchdog in watchdogs:
        stop_request = watchdog.check()
        if stop_request:
            say(f"killing the command: {stop_request.message}")
            return stop_request
    return None


def _start(command: SupervisedCommand) -> int:
    """Start the command and return its pid; it gets the terminal, if there is one."""
    argv, environment, streams, standby = command
    ends = streams.ends if streams else {}
    child = standby.start(argv, environment, ends) if standby else None
    if child is None:
        child = _spawn(argv, environment, ends)
    if _take_terminal(child, os.getpgrp()):
        with suppress(OSError):  # it may have read before, and stopped
            os.killpg(child, signal.SIGCONT)
    return child


def _spawn(argv: list[str], environment: Mapping[str, str], ends: Mapping[int, int]) -> int:
    """Start a process and return its pid. The signal dispositions of Python are reset."""
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, end, stream) for stream, end in ends.items()],
            setpgroup=0,
            setsigmask=(),
            setsigdef=RESET_SIGNALS,
        )
    except FileNotFoundError as error:
        message = _explain_missing(argv[0], environment.get("PATH", ""))
        raise LaunchError("CommandNotFound", message, exit_code=NOT_FOUND) from error
    except OSError as error:
        message = f"Cannot start {argv[0]}: {error.strerror}."
        raise LaunchError("CommandNotExecutable", message, exit_code=NOT_EXECUTABLE) from error


def _take_terminal(group: int, owner: int) -> bool:
    """Let a process group read the terminal and get its Ctrl-C, if the owner has one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        if os.tcgetpgrp(0) != owner:
            return False
        os.tcsetpgrp(0, group)
    except OSError:  # no terminal
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def _explain_missing(program: str, path: str) -> str:
    """Why execve(2) does not find a program, which may lack its interpreter only."""
    found = program if os.path.isfile(program) else shutil.which(program, path=path)
    first = b""
    if found:
        with suppress(OSError), open(found, "rb") as file:
            first = file.readline(256).rstrip(b"\n")
    if not first.startswith(b"#!"):
        return f"The image has no program {program} (PATH: {path})."
    if first.endswith(b"\r"):
        return (
            f"{program} has Windows line endings (CRLF), so its interpreter is not found. Convert"
            f" it, for example with: sed -i 's/\\r$//' {program}"
        )
    interpreter = os.fsdecode(first[2:].split()[0]) if first[2:].split() else ""
    return (
        f"{program} needs the interpreter {interpreter or '(none)'} (its first line), which the"
        " image does not have."
    )


def _clear(seconds: float) -> bool:
    """Kill and reap remaining processes. False if some remain: the kernel may block a process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        remaining = descendants(os.getpid())
        if not remaining:
            return True
        send(remaining, signal.SIGKILL)
        signal.sigtimedwait(_CHILD_SIGNALS, _POLL)
        _reap(0)
    return False


def _reap(child: int) -> int | None:
    """Reap all ended children, also adopted ones; the wait status of `child`, or None."""
    child_status = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                child_status = status
    return child_status
