"""The launcher's steps: workspace, directory, gate, names, command, termination message."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from typing import Iterator, Mapping, MutableMapping, NamedTuple, Sequence

from . import contract, output, podinfo, torchrun
from .command import Run, decide
from .command_end import (
    PEER_FAILED,
    RELOADED,
    UNNOTICED_SECONDS,
    cause_after_leftovers,
    cause_of_end,
    cause_of_missed_round,
    cause_of_request,
    cause_of_round,
    cause_of_survivors,
    describe_stop,
)
from .command_environment import default_threads, environment_of_command, make_reports_folder
from .contract import LAUNCH_FAILED, STOPPED
from .copies import Copy
from .errors import LaunchError
from .failure import Cause
from .fencing import GangId, Worker, take_over
from .gang.leader import Predecessor
from .gang.messages import StartRound, StopRound
from .gang.rounds import GangNode, Rounds, follow, lead
from .gate import has_fence_order, is_open, pass_gate, read_predecessor
from .hang import HangWatchdog
from .memory import OomWatchdog
from .output import say, timestamp, write_termination_message
from .preparation import RoundPreparation, describe_hidden, enter_directory
from .processes import Process, Running, descendants, running, send, signal_name
from .reload import Reload
from .rendezvous import of_round
from .reporting import Reporter, describe_restarts, newest_step
from .served import ServedWorkspace
from .settings import Settings, beside_head, from_environment, read
from .state import usable
from .store import RoundStore
from .streams import Streams
from .success import find_background
from .supervise import STOPPING, CommandExit, StopRequest, Watchdog, supervise
from .venv import make, use
from .workspace import SharedWorkspace, UncopiedWorkspace, WorkspaceCopy
from .world import WorldWatch, cause_of_training_alone

_KILL_SECONDS = 2.0  # for killed processes to end
_COPY_SECONDS = 2.0  # at the end, to write the rest of the log to the job's storage
_ROUND_GRACE = 5.0  # grace period of ranks before the next round


def main() -> int:
    """Run the command of TORCHRUN_COMMAND and return the container's exit code.

    With the argument `setup`, create the job's Python environment and run no command.
    """
    setup_only = sys.argv[1:] == ["setup"]
    log = read(os.environ, contract.TERMINATION_LOG)
    hidden = ""
    for number in STOPPING:
        signal.signal(number, lambda number, _: _stop_now(log, number))
    try:
        os.environ.update(beside_head(os.environ))
        settings = from_environment(os.environ)
        os.environ.pop(contract.GANG_KEY, None)  # a command may print its environment
        workspace = prepare(settings)
        hidden = describe_hidden(settings, os.environ)
        if hidden:
            say(f"Warning: {hidden}")
        cause = None if setup_only else launch(settings, os.environ, workspace)
    except LaunchError as error:
        if hidden and error.reason in ("TorchMissing", "CommandNotFound"):
            error.message += f" {hidden}"
        say(f"error: {error.message}")
        cause = _cause_of_error(error)
    except Exception as error:
        traceback.print_exc()
        message = f"The launcher has a bug: {error!r}. The log of the pod has the traceback."
        cause = Cause(LAUNCH_FAILED, None, None, "LaunchFailed", message, timestamp())
    if cause is None:
        return 0
    write_termination_message(log, cause.body())
    return cause.exit_code


def _cause_of_error(error: LaunchError) -> Cause:
    return Cause(error.exit_code, None, None, error.reason, error.message, timestamp())


def prepare(settings: Settings) -> WorkspaceCopy | None:
    """Copy the workspace, and create the job's environment in the pod. Raises LaunchError."""
    workspace = _open_workspace(settings)
    if workspace:
        workspace.update(podinfo.number(settings.start_file, contract.REVISION_ANNOTATION))
    enter_directory(settings)
    if settings.place and settings.recipe:
        make(settings.place, settings.recipe)
    return workspace


def _open_workspace(settings: Settings) -> WorkspaceCopy | None:
    target = settings.workspace_target
    if settings.server:
        return ServedWorkspace(settings.server, settings.start_file, target, settings.sync_wait)
    if not settings.workspace_source:
        return None
    if settings.workspace_source == target:
        return UncopiedWorkspace()
    workspace = SharedWorkspace(settings.workspace_source, target)
    workspace.wait(settings.sync_wait)
    return workspace


def launch(
    settings: Settings, environment: MutableMapping[str, str], workspace: WorkspaceCopy | None
) -> Cause | None:
    """Run the job's command; None if it succeeded. Raises LaunchError if it did not start.

    environment: of this process. It is changed, so that programs are found as in the command.
    """
    state = usable(settings.state_dir)
    failed_state = "" if state else settings.state_dir
    settings = settings._replace(state_dir=state)
    if settings.place:
        environment.update(use(settings.place, environment, settings.sync_wait))
    decided = decide(settings.command, settings.launcher, settings.nnodes, torchrun.python())
    run = torchrun.with_torch(decided)
    several = settings.ranks > 1 and not settings.gang.is_head
    program = Program(
        argv=torchrun.argv(run),
        script=run.script,
        may_train_alone=several and settings.launcher == "auto" and not run.under_torchrun,
        store=_store(run, settings.gang),
    )
    preposition = "with" if run.under_torchrun else "without"
    say(f"starting the command {preposition} torchrun, because {run.why}")
    if settings.launcher != "none":
        for name, value in default_threads(environment).items():
            environment[name] = value
            cpus, ranks = environment[contract.CPUS], environment[contract.PET_NPROC_PER_NODE]
            say(f"{name} is {value}, from {cpus} CPUs for {ranks} ranks")
    reload = Reload(workspace, settings.start_file, settings.edit_wait)
    fencing: list[Watchdog] = []

    def pass_own_gate() -> Predecessor:
        unfenced = pass_gate(settings.start_file, settings.attempt)
        fencing.extend(_take_over(settings, failed_state, unfenced))
        return read_predecessor(settings.start_file)

    def fence_older() -> None:
        fencing.extend(_take_over(settings, failed_state, []))

    gang = settings.gang
    with _copied_log(settings):
        if gang.is_leader:
            rounds = lead(gang, settings.limits, pass_own_gate, reload.announce)
        elif is_open(settings.start_file, settings.attempt):
            pass_own_gate()
            rounds = follow(gang, lambda: None, settings.resolve_wait)
        else:
            rounds = follow(gang, fence_older, settings.resolve_wait)
        try:
            return _run_rounds(settings, environment, program, fencing, rounds, reload)
        finally:
            program.store.close()
            rounds.close()


class RoundEnd(NamedTuple):
    """How the command of a round ended on this node.

    cause: None if it succeeded. step: the newest one that rank 0 reported on this node. is_silent:
    it had no output and no step. begun_after: seconds to its first sign for the hang watch.
    """

    exit: CommandExit
    cause: Cause | None
    step: int | None = None
    is_silent: bool = False
    begun_after: float | None = None


class Program(NamedTuple):
    """What a node starts in each round.

    may_train_alone: several ranks are wanted, and nothing proves yet that the command starts them.
    store: of a rendezvous by torchrun. script: see Run.
    """

    argv: list[str]
    script: str
    may_train_alone: bool
    store: RoundStore


def _store(run: Run, gang: GangNode) -> RoundStore:
    """The store, unless the command may choose another rendezvous."""
    is_ours = run.under_torchrun or not any("rdzv" in word for word in run.argv)
    is_used = gang.size > 1 and is_ours and (run.under_torchrun or run.starts_ranks)
    python = torchrun.python_of_torchrun(run)
    before = run.before if run.in_environment else ""
    return RoundStore(python, before, is_used=is_used, is_host=gang.is_leader)


def _take_over(settings: Settings, failed_state: str, unfenced: list[Worker]) -> list[Watchdog]:
    """Fence older gangs; the watchdog for newer gangs, if there is a state directory."""
    if not (settings.job_uid and settings.attempt):
        return []
    gang = GangId(settings.job_uid, int(settings.attempt))
    log = settings.termination_log
    watchdog = take_over(
        settings.state_dir,
        gang,
        settings.node,
        unfenced,
        lambda request: _end_now(log, request),
        failed_state=failed_state,
    )
    return [watchdog] if watchdog else []


def _run_rounds(
    settings: Settings,
    environment: Mapping[str, str],
    program: Program,
    fencing: list[Watchdog],
    rounds: Rounds,
    reload: Reload,
) -> Cause | None:
    """Run the command in each round of the gang. The cause of its end on this node."""
    cause: Cause | None = cause_of_missed_round()
    leave = _LeaveNotice(rounds)
    preparation = RoundPreparation(settings, program.script, reload)
    last_round = rounds.newest_round
    command_exit: CommandExit | None = None
    begun_after: float | None = None
    while True:
        start = _await_start(settings, rounds)
        if start is None:
            earlier = rounds.earlier_cause()
            if earlier:
                return cause_after_leftovers(cause, earlier, settings.gang.rank)
            if rounds.newest_round > last_round:
                return cause_of_missed_round()
            if cause is None and rounds.trains_alone():
                cause = cause_of_training_alone()
                _report(cause)
            return cause
        output.restarts_in_place = start.restarts
        if command_exit and command_exit.has_survivors and descendants(os.getpid()):
            return _leave_with_survivors(rounds, cause_of_survivors())
        last_round = start.round
        try:
            with _interruptible():
                stop = preparation.run(start, rounds.stop_order)
            if stop:
                say(f"round {start.round} does not start on this node: {describe_stop(stop)}")
                cause = cause_of_missed_round()
                rounds.end(None, None, stopped=True)
                continue
            if start.round > 0:
                say(f"starting round {start.round}")
            variables = program.store.start(of_round(environment, start.round))
            watchdogs = [*fencing, leave]
            end = _run(settings, variables, program, watchdogs, rounds, begun_after)
        except LaunchError as error:
            if not error.is_of_command:
                raise
            failed = CommandExit(error.exit_code, None, None, None, False, False)
            end = RoundEnd(failed, _cause_of_error(error))
        command_exit, cause, begun_after = end.exit, end.cause, end.begun_after
        reason = cause.reason if cause else ""
        was_stopped = command_exit.for_next_round and reason in (PEER_FAILED, RELOADED)
        if not was_stopped:
            _report(cause)
        if command_exit.stopped_by is not None:
            return cause
        if cause and command_exit.has_survivors:
            return _leave_with_survivors(rounds, cause)
        if settings.gang.is_leader and not command_exit.for_next_round:
            reload.await_announcement()
        rounds.end(cause, end.step, stopped=was_stopped, is_silent=end.is_silent)


def _await_start(settings: Settings, rounds: Rounds) -> StartRound | None:
    """Wait for the next round. The controller gets a report if the gang waits for an edit."""
    reporters: list[Reporter] = []

    def on_edit_wait() -> None:
        if settings.gang.is_leader and settings.progress_url:
            reporters.append(_make_reporter(settings, "", rounds, is_awaited=False))

    try:
        return rounds.await_start(on_edit_wait)
    finally:
        for reporter in reporters:
            reporter.close()


def _leave_with_survivors(rounds: Rounds, cause: Cause) -> Cause:
    say("processes of the command cannot be killed: this pod ends")
    rounds.leave()
    return cause


def _report(cause: Cause | None) -> None:
    if cause:
        say(f"failed with exit code {cause.exit_code}: {cause.message}")


class _LeaveNotice:
    """Reports to the gang that Kubernetes ends this pod."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def check(self) -> StopRequest | None:
        """Nothing to check."""
        return None

    def on_stop(self, *, leaving: bool) -> None:
        """Report it, unless only the round ends."""
        if leaving:
            self._rounds.leave()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a signal end the launcher at once, because no command runs that could handle it."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    settings: Settings,
    environment: Mapping[str, str],
    program: Program,
    watchdogs: Sequence[Watchdog],
    rounds: Rounds,
    begun_after: float | None,
) -> RoundEnd:
    """Supervise the command of one round. begun_after: of the round before."""
    reports = make_reports_folder()
    memory = OomWatchdog()
    streams = _streams(settings)
    reporter = _reporter(settings, reports, rounds)
    hang: HangWatchdog | None = None
    if settings.hang_timeout:
        chunks = (lambda: streams.chunks) if streams else (lambda: 0)
        hang = HangWatchdog(settings.hang_timeout, reports, chunks, begun_after)
        watchdogs = [*watchdogs, hang]
    watchdogs = [*watchdogs, memory]
    world = _world_watch(settings, reports, rounds, reporter) if program.may_train_alone else None
    if world:
        watchdogs = [*watchdogs, world]
    background: Process | None = None

    def look_at_background() -> None:
        nonlocal background
        background = find_background(reports)

    stop: StopRound | None = None
    stopped_at = 0.0
    at_stop = Running()

    def end_of_round() -> float | None:
        nonlocal stop, stopped_at, at_stop
        stop, stopped_at = rounds.stop_order(), time.time()
        if stop is None:
            return None
        at_stop = running(os.getpid())
        say(f"stopping the ranks, because {describe_stop(stop)}")
        return min(settings.grace or _ROUND_GRACE, _ROUND_GRACE)

    try:
        variables = environment_of_command(environment, reports, bool(settings.hang_timeout))
        try:
            command_exit = supervise(
                program.argv,
                variables,
                settings.grace,
                watchdogs,
                streams,
                end_of_round,
                look_at_background,
            )
        finally:
            if streams:
                streams.close()
        if world:
            world.check()
        cause = (
            cause_of_round(stop, stopped_at, at_stop, reports, memory.has_killed(UNNOTICED_SECONDS))
            if command_exit.for_next_round and stop
            else cause_of_end(
                command_exit, settings.command, background, reports, memory.has_killed()
            )
        )
        step = newest_step(reports)
        is_silent = streams is not None and not streams.chunks and step is None
        return RoundEnd(command_exit, cause, step, is_silent, hang.begun_after if hang else None)
    finally:
        if reporter:
            reporter.close()
        shutil.rmtree(reports, ignore_errors=True)


def _reporter(settings: Settings, reports: str, rounds: Rounds) -> Reporter | None:
    if not (settings.progress_url and reports):
        return None
    is_remembered = rounds.has_awaited_edit or has_fence_order(settings.start_file)
    is_awaited = settings.gang.is_leader and is_remembered
    return _make_reporter(settings, reports, rounds, is_awaited=is_awaited)


def _make_reporter(
    settings: Settings, reports: str, rounds: Rounds, *, is_awaited: bool
) -> Reporter:
    restarts = describe_restarts(rounds.restarts(), is_awaited)
    return Reporter(settings.progress_url, settings.progress_token_file, reports, restarts)


def _world_watch(
    settings: Settings, reports: str, rounds: Rounds, reporter: Reporter | None
) -> WorldWatch:
    def announce(alone: bool) -> None:
        if reporter:
            reporter.replace(describe_restarts(rounds.restarts(), True, alone))

    return WorldWatch(rounds, reports, announce)


def _streams(settings: Settings) -> Streams | None:
    """Pipes for the command's output if the launcher reads it. A terminal remains unchanged."""
    if os.isatty(1) or not (settings.state_dir or settings.hang_timeout):
        return None
    return Streams(_feed_copies)


def _feed_copies(stream: int, data: bytes) -> None:
    for copy in output.copies:
        copy(stream, data)


@contextmanager
def _copied_log(settings: Settings) -> Iterator[None]:
    """Copy the logs of command and launcher to the job's storage while the block runs."""
    if not settings.state_dir:
        yield
        return
    copy = Copy(settings.state_dir, settings.attempt or "0", settings.node or "0")
    output.copies.append(copy.add)
    try:
        yield
    finally:
        output.copies.remove(copy.add)
        copy.close(_COPY_SECONDS)


def _stop_now(log: str, number: int) -> None:
    """Handle a signal before the command runs."""
    message = f"Stopped by {signal_name(number)} before the command started."
    say(message)
    send(descendants(os.getpid()), signal.SIGKILL)  # processes of the setup
    body = Cause(STOPPED, None, number, "Stopped", message, timestamp()).body()
    write_termination_message(log, body)
    os._exit(STOPPED)


def _end_now(log: str, stop_request: StopRequest) -> None:
    """End the ranks and this process from a thread, as the main thread may be blocked."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline and (remaining := descendants(os.getpid())):
        send(remaining, signal.SIGKILL)
        time.sleep(0.05)
    say(f"killing the ranks: {stop_request.message}")
    write_termination_message(log, cause_of_request(stop_request, out_of_memory=False).body())
    os._exit(stop_request.exit_code)
