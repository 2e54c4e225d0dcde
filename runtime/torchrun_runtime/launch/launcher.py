"""The launcher of one node: prepares it, runs the command in rounds, and reports how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from typing import Iterator, MutableMapping, Sequence

from . import contract, podinfo, torchrun
from .cause import PEER_STOPPED, WAS_STOPPED, Cause, LaunchError
from .checkpoints import CheckpointReporter, describe
from .command import Run, decide
from .command_end import (
    cause_after_leftovers,
    cause_of_missed_round,
    cause_of_request,
    cause_of_survivors,
    describe_stop,
)
from .contract import LAUNCH_FAILED, STOPPED
from .fencing import FencingWatchdog, GangId, OlderWorker, take_over, usable
from .gang.leader import Predecessor
from .gang.messages import StartRound
from .gang.rounds import Rounds, follow, lead
from .output import TerminationLog, copied_to, say, timestamp
from .podinfo import is_open, pass_gate, read_predecessor
from .preparation import RoundPreparation, describe_hidden, enter_directory
from .processes import descendants, send, signal_name
from .reload import Reload
from .rendezvous import RoundStore, of_round
from .reporting import Reporter, describe_restarts
from .round import Program, Round, RoundEnd
from .served import ServedWorkspace
from .settings import LaunchSettings, complete, from_environment, read
from .standby import StandbyAgent
from .streams import Copy
from .supervise import STOPPING, StopRequest
from .venv import make, use
from .workspace import SharedWorkspace, UncopiedWorkspace, WorkspaceCopy
from .world import cause_of_training_alone

_KILL_SECONDS = 2.0  # for killed processes to end
_COPY_SECONDS = 2.0  # at the end, to write the rest of the log to the job's storage
# Errors whose reason may be that the workspace hides a folder of the image.
_OF_HIDDEN = ("TorchMissing", "CommandNotFound")


def main() -> int:
    """Run the command of TORCHRUN_COMMAND and return the container's exit code.

    With the argument `setup`, create the job's Python environment and run no command.
    """
    log = TerminationLog(read(os.environ, contract.TERMINATION_LOG))
    for number in STOPPING:
        signal.signal(number, lambda number, _: _stop_now(log, number))
    cause = _launch(log, setup_only=sys.argv[1:] == ["setup"])
    if cause is None:
        log.write_success()
        return 0
    log.write(cause.body())
    return cause.exit_code


def _launch(log: TerminationLog, *, setup_only: bool) -> Cause | None:
    """Why the container ends; None if the command has succeeded."""
    try:
        os.environ.update(complete(os.environ))
        settings = from_environment(os.environ)
        os.environ.pop(contract.GANG_KEY, None)  # a command may print its environment
        launcher = Launcher(settings, os.environ, log)
        launcher.prepare()
        return None if setup_only else launcher.run()
    except LaunchError as error:
        say(f"error: {error.message}")
        return error.cause
    except Exception as error:
        traceback.print_exc()
        message = f"The launcher has a bug: {error!r}. The log of the pod has the traceback."
        return Cause(LAUNCH_FAILED, None, None, "LaunchFailed", message, timestamp())


class Launcher:
    """Runs the command of one node in the rounds of its gang: first `prepare`, then `run`.

    environment: of this process. It is changed, so that programs are found as in the command.
    termination_log: for a watchdog that ends the process.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        environment: MutableMapping[str, str],
        termination_log: TerminationLog,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._termination_log = termination_log
        self._workspace: WorkspaceCopy | None = None
        self._hidden = ""  # what the workspace hides of the image
        self._state = ""  # the state directory, if it can be used
        self._copy: Copy | None = None  # of the log
        self._fence: FencingWatchdog | None = None
        self._waiting_reporter: Reporter | None = None  # while the gang waits for an edit
        self._checkpoints: CheckpointReporter | None = None  # of node 0

    def prepare(self) -> None:
        """Copy the workspace, and create the job's environment in a setup pod.

        Raises LaunchError.
        """
        settings = self._settings
        self._workspace = _open_workspace(settings)
        if self._workspace:
            revision = podinfo.number(settings.start_file, contract.REVISION_ANNOTATION)
            self._workspace.update(revision)
        enter_directory(settings)
        if settings.place and settings.recipe:
            make(settings.place, settings.recipe)
        self._hidden = describe_hidden(settings, self._environment)
        if self._hidden:
            say(f"Warning: {self._hidden}")

    def run(self) -> Cause | None:
        """Run the command; why it failed, None if it succeeded.

        Raises LaunchError if it did not start.
        """
        settings = self._settings
        self._state = usable(settings.state_dir)
        if settings.place:
            self._environment.update(use(settings.place, self._environment, settings.sync_wait))
        self._program = self._find_program()
        self._share_cpus()
        self._reload = Reload(self._workspace, settings.start_file, settings.edit_wait)
        self._preparation = RoundPreparation(settings, self._program.script, self._reload)
        with self._copied_log():
            self._rounds = self._join_gang()
            self._keep_checkpoints()
            try:
                return self._run_rounds()
            finally:
                self._program.store.close()
                self._program.standby.close()
                self._report_last_checkpoints()
                self._rounds.close()

    # Before the first round

    def _find_program(self) -> Program:
        settings = self._settings
        run = decide(settings.command, settings.launcher, settings.nnodes, torchrun.python())
        run = torchrun.with_torch(run)
        several = settings.ranks > 1 and not settings.gang.is_head
        try:
            argv = torchrun.argv(run)
        except LaunchError as error:
            if self._hidden and error.reason in _OF_HIDDEN:
                error.message += f" {self._hidden}"
            raise
        preposition = "with" if run.under_torchrun else "without"
        say(f"starting the command {preposition} torchrun, because {run.why}")
        return Program(
            argv=argv,
            script=run.script,
            may_train_alone=several and settings.launcher == "auto" and not run.under_torchrun,
            store=self._open_store(run),
            standby=self._await_restarts(run, argv),
        )

    def _await_restarts(self, run: Run, argv: list[str]) -> StandbyAgent:
        """A torchrun that waits for the next round, if the command is torchrun and nothing else."""
        words = torchrun.words_of_torchrun(run, argv)
        is_off = read(self._environment, contract.STANDBY) == "0"
        python = torchrun.python_of_torchrun(run) if words and not is_off else []
        return StandbyAgent(python, argv[:words])

    def _open_store(self, run: Run) -> RoundStore:
        """The store of torchrun's rendezvous, unless the command may choose another rendezvous."""
        gang = self._settings.gang
        is_ours = run.under_torchrun or not any("rdzv" in word for word in run.argv)
        return RoundStore(
            torchrun.python_of_torchrun(run),
            run.before if run.in_environment else "",
            is_used=gang.size > 1 and is_ours and (run.under_torchrun or run.starts_ranks),
            is_host=gang.is_leader,
        )

    def _share_cpus(self) -> None:
        """Set OMP_NUM_THREADS for the ranks, if nobody has set it."""
        if self._settings.launcher == "none":
            return
        threads = torchrun.default_threads(self._environment)
        if threads:
            self._environment[torchrun.THREADS] = threads
            cpus = self._environment[contract.CPUS]
            ranks = self._environment[contract.PET_NPROC_PER_NODE]
            say(f"{torchrun.THREADS} is {threads}, from {cpus} CPUs for {ranks} ranks")

    @contextmanager
    def _copied_log(self) -> Iterator[None]:
        """Copy the logs of command and launcher to the job's storage while the block runs."""
        if not self._state:
            yield
            return
        settings = self._settings
        self._copy = Copy(self._state, settings.attempt or "0", settings.node or "0")
        try:
            with copied_to(self._copy.add):
                yield
        finally:
            self._copy.close(_COPY_SECONDS)

    def _join_gang(self) -> Rounds:
        """Lead the gang or follow its leader, and fence the ranks of older gangs before."""
        settings = self._settings
        if settings.gang.is_leader:
            return lead(settings.gang, settings.limits, self._pass_gate, self._reload.announce)
        if is_open(settings.start_file, settings.attempt):
            self._pass_gate()
            return follow(settings.gang, None, settings.resolve_wait)
        return follow(settings.gang, self._take_over, settings.resolve_wait)

    def _pass_gate(self) -> Predecessor:
        """Wait at the start gate of this pod. What an earlier pod of this node has left."""
        settings = self._settings
        self._take_over(pass_gate(settings.start_file, settings.attempt))
        return read_predecessor(settings.start_file)

    def _take_over(self, unfenced: Sequence[OlderWorker] = ()) -> None:
        """Fence older gangs, and watch for newer ones if there is a state directory."""
        settings = self._settings
        if not (settings.job_uid and settings.attempt):
            return
        self._fence = take_over(
            self._state,
            GangId(settings.job_uid, int(settings.attempt)),
            settings.node,
            list(unfenced),
            lambda request: _end_now(self._termination_log, request),
            failed_state="" if self._state else settings.state_dir,
        )

    def _keep_checkpoints(self) -> None:
        """Report complete checkpoints from node 0, also in its termination message."""
        rounds, settings = self._rounds, self._settings
        if not settings.gang.is_leader or settings.node not in ("", "0"):
            return
        self._checkpoints = CheckpointReporter(lambda: rounds.checkpoints().newest)
        self._termination_log.checkpoints = lambda: describe(rounds.checkpoints().newest)

    def _report_last_checkpoints(self) -> None:
        """Report those that became complete when the ranks ended, here or on other nodes."""
        if self._checkpoints is None:
            return
        self._rounds.await_saves(self._settings.grace)
        if self._settings.report_port and self._checkpoints.has_news:
            Reporter(self._settings.report_port, "", b"", self._checkpoints).close()

    # The rounds

    def _run_rounds(self) -> Cause | None:
        """Run the command in each round of the gang; why this node ends, None for success."""
        end = RoundEnd(cause_of_missed_round())
        while True:
            start = self._await_start()
            if start is None:
                return self._cause_of_end(end)
            self._termination_log.restarts_in_place = start.restarts
            if end.has_survivors and descendants(os.getpid()):
                return self._leave(cause_of_survivors())
            end = self._run_round(start, end)
            if end.leaves:
                return end.cause
            if end.cause and end.has_survivors:
                return self._leave(end.cause)
            if self._settings.gang.is_leader and not end.by_order:
                self._reload.await_announcement()
            self._rounds.end(end.cause, end.step, stopped=end.was_stopped, is_silent=end.is_silent)

    def _await_start(self) -> StartRound | None:
        """Wait for the next round; None if there is none."""
        try:
            return self._rounds.await_start(self._report_wait_for_edit)
        finally:
            if self._waiting_reporter:
                self._waiting_reporter.close()
                self._waiting_reporter = None

    def _report_wait_for_edit(self) -> None:
        """Report to the controller, until the next round, that the gang waits for an edit."""
        settings = self._settings
        if settings.gang.is_leader and settings.report_port:
            restarts = describe_restarts(self._rounds.restarts())
            self._waiting_reporter = Reporter(settings.report_port, "", restarts)

    def _run_round(self, start: StartRound, last: RoundEnd) -> RoundEnd:
        """Prepare a round and run the command. A command that cannot start fails its round.

        Raises LaunchError if the node cannot be prepared.
        """
        try:
            with _interruptible():
                stop = self._preparation.run(start, self._rounds.stop_order)
            if stop:
                say(f"round {start.round} does not start on this node: {describe_stop(stop)}")
                end = RoundEnd(cause_of_missed_round(), start.round, by_order=True)
                return end._replace(begun_after=last.begun_after)
            if start.round > 0:
                say(f"starting round {start.round}")
            self._say_checkpoint(start)
            variables = self._program.store.start(of_round(self._environment, start.round))
            command = Round(
                self._settings,
                self._program,
                self._rounds,
                self._copy,
                self._fence,
                self._checkpoints,
                last.begun_after,
            )
            end = command.run(start, variables)
        except LaunchError as error:
            if not error.is_of_command:
                raise
            # As after a command: a signal does not replace the cause any more.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            end = RoundEnd(error.cause, start.round)
        if not end.was_stopped:
            _report(end.cause)
        return end

    def _say_checkpoint(self, start: StartRound) -> None:
        """Write what the ranks resume from, and on the first node which checkpoints are skipped."""
        for node, checkpoint in self._rounds.checkpoints().skipped:
            say(
                f"skipping the checkpoint of step {checkpoint.step}, which does not exist on node"
                f" {node}: {checkpoint.path}"
            )
        if start.checkpoint:
            say(f"resuming from step {start.checkpoint.step}: {start.checkpoint.path}")

    def _cause_of_end(self, end: RoundEnd) -> Cause | None:
        """Why this node ends without another round. end: of its last one."""
        earlier = self._rounds.earlier_cause()
        if earlier:
            return cause_after_leftovers(end.cause, earlier, self._settings.gang.rank)
        if self._rounds.newest_round > end.round:
            return cause_of_missed_round()
        if end.cause is None and self._rounds.trains_alone():
            cause = cause_of_training_alone()
            _report(cause)
            return cause
        return end.cause

    def _leave(self, cause: Cause) -> Cause:
        """End the gang: no rank may start beside processes that survive their command."""
        say("processes of the command cannot be killed: this pod ends")
        self._rounds.leave()
        return cause


def _open_workspace(settings: LaunchSettings) -> WorkspaceCopy | None:
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


def _report(cause: Cause | None) -> None:
    if cause:
        word = "stopped" if cause.reason in (WAS_STOPPED, PEER_STOPPED) else "failed"
        say(f"{word} with exit code {cause.exit_code}: {cause.message}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a signal end the launcher at once, because no command runs that could handle it."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_now(log: TerminationLog, number: int) -> None:
    """Handle a signal before the command runs."""
    message = f"Stopped by {signal_name(number)} before the command started."
    say(message)
    send(descendants(os.getpid()), signal.SIGKILL)  # processes of the setup
    log.write(Cause(STOPPED, None, number, WAS_STOPPED, message, timestamp()).body())
    os._exit(STOPPED)


def _end_now(log: TerminationLog, stop_request: StopRequest) -> None:
    """End the ranks and this process from a thread, as the main thread may be blocked."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline and (remaining := descendants(os.getpid())):
        send(remaining, signal.SIGKILL)
        time.sleep(0.05)
    say(f"killing the ranks: {stop_request.message}")
    log.write(cause_of_request(stop_request, out_of_memory=False).body())
    os._exit(stop_request.exit_code)
