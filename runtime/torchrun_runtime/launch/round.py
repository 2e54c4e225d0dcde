"""One round of a node: the command with its environment, its output and what watches it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from typing import Mapping, NamedTuple

from . import contract
from .cause import PEER_FAILED, WAS_STOPPED, Cause
from .checkpoints import CheckpointReporter, read_saves, write_resume_file
from .command_end import (
    UNNOTICED_SECONDS,
    cause_of_agreement,
    cause_of_end,
    cause_of_round,
    describe_stop,
)
from .debug import DEBUG_SIGNAL, is_debugged
from .failure import find_background, read_reports
from .fencing import FencingWatchdog
from .gang.messages import NEVER, StartRound, StopRound
from .gang.rounds import Rounds
from .network import NetworkLog, NetworkWatch, open_network_log
from .output import say
from .podinfo import has_fence_order
from .processes import Process, Running, running
from .rendezvous import RoundStore
from .reporting import Reporter, describe_restarts, newest_step
from .settings import LaunchSettings
from .stacks import STACK_SIGNAL
from .standby import StandbyAgent, StandbyWatch
from .stopping import PlannedStop, open_planned_stop
from .streams import Copy, Streams
from .supervise import CommandExit, StopRequest, SupervisedCommand, Watchdog, supervise
from .watchdogs import HangWatchdog, OomWatchdog
from .world import WorldWatch

_ROUND_GRACE = 5.0  # grace period of ranks before the next round


class Program(NamedTuple):
    """What a node starts in each round.

    may_train_alone: several ranks are wanted, and nothing proves yet that the command starts them.
    store: of a rendezvous by torchrun. standby: of torchrun. script: see Run.
    """

    argv: list[str]
    script: str
    may_train_alone: bool
    store: RoundStore
    standby: StandbyAgent


class RoundEnd(NamedTuple):
    """How a round ended on this node.

    cause: None if the command succeeded. by_order: the leader has stopped the round. leaves:
    Kubernetes ends this pod. has_survivors: processes of the command still exist. step: the newest
    one that rank 0 reported on this node. is_silent: the command had no output and no step.
    begun_after: seconds to its first sign for the hang watch.
    """

    cause: Cause | None
    round: int = NEVER
    by_order: bool = False
    leaves: bool = False
    has_survivors: bool = False
    step: int | None = None
    is_silent: bool = False
    begun_after: float | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether the order of the leader is all that ended the round on this node."""
        reason = self.cause.reason if self.cause else ""
        return self.by_order and reason in (PEER_FAILED, WAS_STOPPED)


class Round:
    """One run of the command.

    copy: of its output. fence: ends the command once a newer gang has taken over. checkpoints: the
    report of node 0, None on others. begun_after: of the round before.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        program: Program,
        rounds: Rounds,
        copy: Copy | None,
        fence: FencingWatchdog | None,
        checkpoints: CheckpointReporter | None,
        begun_after: float | None,
    ) -> None:
        self._settings = settings
        self._program = program
        self._rounds = rounds
        self._reports = make_reports_folder()
        self._streams = self._open_streams(copy)
        self._reporter = self._start_reporter(checkpoints)
        self._resume_file = ""
        self._memory = OomWatchdog()
        self._hang: HangWatchdog | None = None
        if settings.hang_timeout:
            self._hang = HangWatchdog(
                settings.hang_timeout,
                self._reports,
                self._count_output,
                begun_after,
                lambda: rounds.is_debugged(is_debugged(self._reports)),
            )
        self._is_alone = False
        self._world: WorldWatch | None = None
        if program.may_train_alone:
            self._world = WorldWatch(rounds, self._reports, self._report_alone)
        self._network_log = self._open_network_log()
        self._network: NetworkWatch | None = None
        if self._network_log:
            self._network = NetworkWatch(rounds, self._network_log, self._report_again)
        watchdogs = (
            *(fence, _LeaveNotice(rounds), self._hang, self._memory),
            *(self._world, self._network),
        )
        self._watchdogs: list[Watchdog] = [each for each in watchdogs if each is not None]
        # The order that ended the round, its time, and what ran then.
        self._stop: StopRound | None = None
        self._stopped_at = 0.0
        self._at_stop = Running()
        self._background: Process | None = None  # left by a command that ended with 0
        self._planned: PlannedStop | None = None

    def run(self, start: StartRound, environment: Mapping[str, str]) -> RoundEnd:
        """Run the command to its end. Raises LaunchError if it cannot start."""
        grace = self._settings.grace
        self._planned = open_planned_stop(self._rounds, start.round, self._reports, grace)
        try:
            self._resume_file = write_resume_file(self._reports, start.checkpoint)
            command_exit = self._supervise(environment)
            self._look_at_saves()
            if self._world:
                self._world.check()
            if self._network:
                self._network.check()
            step = newest_step(self._reports)
            return RoundEnd(
                self._cause_of(command_exit),
                start.round,
                by_order=command_exit.for_next_round,
                leaves=command_exit.is_leaving,
                has_survivors=command_exit.has_survivors,
                step=step,
                is_silent=self._streams is not None and not self._streams.chunks and step is None,
                begun_after=self._hang.begun_after if self._hang else None,
            )
        finally:
            if self._reporter:
                self._reporter.close()
            if self._network_log:
                self._network_log.close()
            shutil.rmtree(self._reports, ignore_errors=True)

    def _supervise(self, environment: Mapping[str, str]) -> CommandExit:
        variables, standby = self._environment_of_command(environment), self._program.standby
        self._watchdogs.append(StandbyWatch(standby, self._reports, variables))
        try:
            return supervise(
                SupervisedCommand(self._program.argv, variables, self._streams, standby),
                self._settings.grace,
                self._watchdogs,
                self._end_of_round,
                self._look_at_background,
                self._planned,
                self._look_at_saves,
            )
        finally:
            if self._streams:
                self._streams.close()

    def _environment_of_command(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment, with unbuffered output and with Python's reports of exceptions."""
        hooks = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank")
        path = environment.get("PYTHONPATH", "")
        return {
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            # setproctitle must not overwrite /proc/PID/environ, see processes.ranks
            "SPT_NOENV": "1",
            **environment,
            "PYTHONPATH": os.pathsep.join([hooks, path] if path else [hooks]),
            contract.LAUNCH_REPORTS: self._reports,
            contract.RESUME_FILE: self._resume_file,
            contract.STACK_SIGNAL: str(int(STACK_SIGNAL)),
            contract.DEBUG_SIGNAL: str(int(DEBUG_SIGNAL)),
        }

    # While the command runs

    def _end_of_round(self) -> float | None:
        """The grace period of the ranks once the leader has stopped the round."""
        self._stop, self._stopped_at = self._rounds.stop_order(), time.time()
        if self._stop is None:
            return None
        self._at_stop = running(os.getpid())
        say(f"stopping the ranks, because {describe_stop(self._stop)}")
        return min(self._settings.grace or _ROUND_GRACE, _ROUND_GRACE)

    def _look_at_saves(self) -> None:
        """Tell the gang what the ranks have saved. They may save when they are asked to end."""
        if self._reports:
            self._rounds.save(read_saves(self._reports))

    def _look_at_background(self) -> None:
        self._background = find_background(self._reports)

    def _count_output(self) -> int:
        return self._streams.chunks if self._streams else 0

    def _report_alone(self, alone: bool) -> None:
        self._is_alone = alone
        self._report_again()

    def _report_again(self) -> None:
        rounds = self._rounds
        if self._reporter and self._settings.gang.is_leader:
            self._reporter.replace(
                describe_restarts(rounds.restarts(), True, self._is_alone, rounds.networks())
            )

    # Around the command

    def _open_streams(self, copy: Copy | None) -> Streams | None:
        """Pipes for the command's output if the launcher reads it. A terminal stays as it is."""
        if os.isatty(1) or not (copy or self._settings.hang_timeout):
            return None
        return Streams(copy.add if copy else lambda stream, data: None)

    def _open_network_log(self) -> NetworkLog | None:
        """A single node has no network, and a run on one machine no controller to tell."""
        settings = self._settings
        if settings.gang.size < 2 or not (settings.report_port and self._reports):
            return None
        return open_network_log(self._reports)

    def _start_reporter(self, checkpoints: CheckpointReporter | None) -> Reporter | None:
        settings = self._settings
        if not (settings.report_port and self._reports):
            return None
        is_remembered = self._rounds.has_awaited_edit or has_fence_order(settings.start_file)
        is_awaited = settings.gang.is_leader and is_remembered
        restarts = describe_restarts(self._rounds.restarts(), is_awaited)
        return Reporter(settings.report_port, self._reports, restarts, checkpoints)

    def _cause_of(self, command_exit: CommandExit) -> Cause | None:
        if command_exit.for_next_round and self._stop:
            has_killed = self._memory.has_killed(UNNOTICED_SECONDS)
            return cause_of_round(
                self._stop, self._stopped_at, self._at_stop, self._reports, has_killed
            )
        stopped = self._planned.stopped() if self._planned else None
        if stopped and command_exit.stop_request is None:
            return cause_of_agreement(stopped, read_reports(self._reports))
        command, has_killed = self._settings.command, self._memory.has_killed()
        return cause_of_end(command_exit, command, self._background, self._reports, has_killed)


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


def make_reports_folder() -> str:
    """A directory that the command's processes can write to; "" if there is none."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="torchrun-launch-")
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="reports-", dir=beside)
    return ""
