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
from .output import say
from .processes import (
    Process,
    adopt_orphans,
    agents,
    alive,
    catches,
    descendants,
    foremost,
    foremost_orphans,
    handles,
    is_below,
    programs,
    send,
    signal_name,
    trapping,
)
from .streams import Streams

STOPPING = (signal.SIGTERM, signal.SIGINT)
_CHILD_SIGNALS = frozenset({signal.SIGCHLD})
_HANDLED_SIGNALS = frozenset({*_CHILD_SIGNALS, *STOPPING})
_IDLE = 1.0  # seconds between two looks without a signal, should one have been lost
_POLL = 0.1  # seconds between two checks for the end of a round, or while killed processes end
# Poll interval while ranks end. They are not children of the launcher. Their agent polls every
# 0.1 s, and must not be the first to see that one rank fails while another saves.
_POLL_RANKS = 0.005
# For killed processes to end. The kernel may need many seconds to free memory and GPU contexts. The
# leader of the gang waits for 30 s (gang.leader.STOP_SECONDS), with the grace period of a round.
_CLEAR_SECONDS = 24.0
_CLEAR_SECONDS_OF_STOP = 2.0  # in the grace period of the pod, which soon ends the launcher
_AGENT_SECONDS = 10.0  # grace period of torchrun after its ranks have ended


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


class CommandExit(NamedTuple):
    """How the command ended.

    signal: the one that ended it, or None. stopped_by: the signal that the launcher forwarded, or
    None. stop_request: of a watchdog. for_next_round: the launcher ended it for another start.
    has_survivors: processes of the command still exist, because the kernel blocks them.
    """

    exit_code: int
    signal: int | None
    stopped_by: int | None
    stop_request: StopRequest | None
    for_next_round: bool
    has_survivors: bool


def supervise(
    argv: list[str],
    environment: Mapping[str, str],
    grace: float | None,
    watchdogs: Sequence[Watchdog] = (),
    streams: Streams | None = None,
    end_of_round: Callable[[], float | None] | None = None,
    on_success: Callable[[], None] | None = None,
) -> CommandExit:
    """Run `argv` to its end.

    grace: seconds that the ranks have to end after SIGTERM; None: the grace period of the kubelet.
    streams: the command's output; None: that of the launcher. end_of_round: called after each
    signal and ten times a second, returns the grace period with which to end the command for the
    next round, None to go on. on_success: called once the command has ended with 0, before what it
    has left is killed. Raises LaunchError (CommandNotFound, CommandNotExecutable).

    By priority: a stop in progress, or the request of a watchdog, then the end of the round.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    child = _start(argv, environment, streams)
    stop: _GracefulStop | None = None
    stop_request: StopRequest | None = None
    status: int | None = None
    last_check = time.monotonic()
    while True:
        # A signal that ends the pod stays pending while the command is killed: the caller sees it.
        signals = _HANDLED_SIGNALS if stop_request is None else _CHILD_SIGNALS
        number = _stop_signal(_pause(stop, stop_request, end_of_round), signals)
        if number and (stop is None or stop.for_next_round):
            for watchdog in watchdogs:
                watchdog.on_stop(leaving=True)
            stop = _GracefulStop(number, grace)
        ended = _reap(child)
        status = ended if status is None else status
        if status is not None and not (stop and stop.awaits_orphans()):
            if on_success and not (status or stop or stop_request):
                on_success()
            _take_terminal(os.getpgrp(), child)
            leaves = stop is not None and not stop.for_next_round
            has_survivors = not _clear(_CLEAR_SECONDS_OF_STOP if leaves else _CLEAR_SECONDS)
            return _command_exit(status, stop, stop_request, has_survivors)
        if stop:
            stop.advance()
        elif stop_request is None and end_of_round and (round_grace := end_of_round()) is not None:
            for watchdog in watchdogs:
                watchdog.on_stop(leaving=False)
            stop = _GracefulStop(signal.SIGTERM, round_grace, for_next_round=True)
        elif stop_request is None and time.monotonic() - last_check >= _IDLE - _POLL:
            last_check = time.monotonic()
            stop_request = _first_stop_request(watchdogs)
        if stop_request:
            # Parents before children: an agent must not see its ranks end and start them again.
            send(descendants(os.getpid()), signal.SIGKILL)


def _pause(
    stop: _GracefulStop | None,
    stop_request: StopRequest | None,
    end_of_round: Callable[[], float | None] | None,
) -> float:
    """Seconds to wait for a signal before the next check."""
    if stop:
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


def _command_exit(
    status: int,
    stop: _GracefulStop | None,
    stop_request: StopRequest | None,
    has_survivors: bool,
) -> CommandExit:
    """status: of waitpid(2)."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if number is None else 128 + number
    for_next_round = stop is not None and stop.for_next_round
    stopped_by = stop.number if stop and not for_next_round else None
    return CommandExit(code, number, stopped_by, stop_request, for_next_round, has_survivors)


def _first_stop_request(watchdogs: Sequence[Watchdog]) -> StopRequest | None:
    for watchdog in watchdogs:
        stop_request = watchdog.check()
        if stop_request:
            say(f"killing the command: {stop_request.message}")
            return stop_request
    return None


class _GracefulStop:
    """Signal the ranks, which may write a checkpoint; end the other processes after them.

    torchrun kills its ranks 30 s after it gets SIGTERM; old releases cannot change that. Therefore
    it gets its signal last. torchrun also terminates all ranks if one of them dies of the signal
    while another still saves. Therefore it is halted (SIGSTOP) for that time, so that neither a
    second SIGTERM nor a SIGKILL reaches a rank that saves. For the next round, torchrun need not
    end by itself and is killed.
    """

    def __init__(self, number: int, grace: float | None, *, for_next_round: bool = False) -> None:
        self.number = number
        self.for_next_round = for_next_round
        self._deadline = None if grace is None else time.monotonic() + grace
        tree = descendants(os.getpid())
        self._first = foremost(tree, number)
        self._agents = [] if for_next_round else agents(tree)
        self._halted = False
        self._rest: list[Process] = []
        self._rest_since: float | None = None
        self._awaits_orphans = False
        if not for_next_round:
            _report_forwarded(number, self._first)
        saving = [process for process in self._first if catches(process, number)]
        if 0 < len(saving) < len(self._first):
            self._halt_agents()
        send(self._first, number)

    def advance(self) -> None:
        """Take the next step if it is due; never blocks."""
        if self._rest_since is None:
            self._await_first()
        elif self._is_late():
            send(descendants(os.getpid()), signal.SIGKILL)
        elif time.monotonic() - self._rest_since > _AGENT_SECONDS:
            self._kill_rest()

    def awaits_orphans(self) -> bool:
        """Whether programs of a command that has ended handle the signal. They get it here first.

        For example, a wrapper dies of the signal, and the program that it has started has not got
        one yet.
        """
        if self.for_next_round:
            return False
        if not self._awaits_orphans:
            self._awaits_orphans = True
            orphans = foremost_orphans(descendants(os.getpid()), self.number)
            received = {process.pid for process in (*self._first, *self._rest)}
            self._first, self._rest_since = orphans, None
            missed = [process for process in orphans if process.pid not in received]
            if missed:
                _report_forwarded(self.number, missed)
                send(missed, self.number)
        return any(alive(p) and handles(p, self.number) for p in self._first)

    def _await_first(self) -> None:
        remaining = [process for process in self._first if alive(process)]
        if self._is_late():
            if not self.for_next_round:
                say("the grace period is over: killing the remaining processes")
            send(descendants(os.getpid()), signal.SIGKILL)
        elif remaining:
            if len(remaining) < len(self._first):
                self._halt_agents()
            return
        self._rest_since = time.monotonic()
        tree = descendants(os.getpid())
        if self.for_next_round:
            send(tree, signal.SIGKILL)
            return
        shells = [shell for shell in trapping(tree, signal.SIGTERM) if shell not in self._first]
        self._rest = [*programs(tree), *shells]
        send(self._rest, signal.SIGTERM)
        send(self._agents if self._halted else [], signal.SIGCONT)

    def _kill_rest(self) -> None:
        """Kill processes that do not end, except shells in their traps and their programs."""
        remaining = descendants(os.getpid())
        shells = trapping(remaining, signal.SIGTERM)
        spared = shells if self._rest else []
        send([p for p in (self._rest if spared else remaining) if p not in spared], signal.SIGKILL)

    def _halt_agents(self) -> None:
        if self._agents and not self._halted:
            self._halted = True
            send(self._agents, signal.SIGSTOP)

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


def _report_forwarded(number: int, processes: list[Process]) -> None:
    names = ", ".join(f"{process.name}[{process.pid}]" for process in processes)
    say(f"forwarded {signal_name(number)} to {names or 'no process'}")


def _start(argv: list[str], environment: Mapping[str, str], streams: Streams | None) -> int:
    """Start the command and return its pid. The signal dispositions of Python are reset."""
    ends = streams.ends.items() if streams else ()
    try:
        child = os.posix_spawnp(
            argv[0],
            argv,
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, end, stream) for stream, end in ends],
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, *_HANDLED_SIGNALS),
        )
    except FileNotFoundError as error:
        message = _explain_missing(argv[0], environment.get("PATH", ""))
        raise LaunchError("CommandNotFound", message, exit_code=NOT_FOUND) from error
    except OSError as error:
        message = f"Cannot start {argv[0]}: {error.strerror}."
        raise LaunchError("CommandNotExecutable", message, exit_code=NOT_EXECUTABLE) from error
    if _take_terminal(child, os.getpgrp()):
        with suppress(OSError):  # it may have read before, and stopped
            os.killpg(child, signal.SIGCONT)
    return child


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
