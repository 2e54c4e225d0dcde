"""The launcher's steps: workspace, directory, names, command, and what there is to tell after."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, Mapping, MutableMapping

from . import contract, output, podinfo, torchrun
from .command import decide
from .copies import Copy
from .errors import LAUNCH_FAILED, LaunchError
from .failure import Cause, find_cause, read_reports
from .fencing import GangId, Worker, take_over
from .gate import pass_gate
from .hang import HangWatchdog
from .memory import oom_kills
from .network import wait_for_names
from .output import say, timestamp, write_termination_message
from .processes import descendants, send, signal_name
from .reload import LATE_SECONDS, Reload, rendezvous
from .reporting import Reporter
from .served import Served
from .settings import Settings, beside_head, from_environment, read
from .stacks import STACK_SIGNAL
from .state import usable
from .streams import Streams
from .supervise import STOPPING, CommandExit, StopRequest, Watchdog, supervise
from .venv import make, use
from .workspace import Workspace

# After a signal that was passed on, whatever the ranks make of it: a rank that writes its
# checkpoint and exits 0 has not finished the training.
STOPPED = 128 + signal.SIGTERM
_KILL_SECONDS = 2.0  # for killed processes to be gone
_COPY_SECONDS = 2.0  # at the end, for what is still on its way to the job's storage


def main() -> int:
    """Run the command of TORCHRUN_COMMAND and return the container's exit code.

    With the argument `setup`, make the job's environment and run no command.
    """
    sets_up = sys.argv[1:] == ["setup"]
    log = read(os.environ, contract.TERMINATION_LOG)
    for number in STOPPING:
        signal.signal(number, lambda number, _: _stop_now(log, number))
    try:
        os.environ.update(beside_head(os.environ))
        settings = from_environment(os.environ)
        workspace = prepare(settings)
        cause = None if sets_up else launch(settings, os.environ, workspace)
    except LaunchError as error:
        say(f"error: {error.message}")
        cause = Cause(error.exit_code, None, None, error.reason, error.message, timestamp())
    except Exception as error:
        traceback.print_exc()
        message = f"the launcher itself failed: {error!r}; its traceback is in the pod's log"
        cause = Cause(LAUNCH_FAILED, None, None, "LaunchFailed", message, timestamp())
    if cause is None:
        return 0
    write_termination_message(log, cause.body())
    return cause.exit_code


def prepare(settings: Settings) -> Workspace | Served | None:
    """Bring the code, and the job's environment where it is made here. Raises LaunchError."""
    workspace = _workspace(settings)
    if workspace:
        workspace.take(podinfo.number(settings.start_file, contract.REVISION_ANNOTATION))
    _enter(_directory(settings))
    if settings.place and settings.recipe:
        make(settings.place, settings.recipe)
    return workspace


def _workspace(settings: Settings) -> Workspace | Served | None:
    target = settings.workspace_target
    if settings.server:
        return Served(settings.server, settings.start_file, target, settings.sync_wait)
    if not settings.workspace_source:
        return None
    workspace = Workspace(settings.workspace_source, target)
    workspace.wait(settings.sync_wait)
    return workspace


def launch(
    settings: Settings, environment: MutableMapping[str, str], workspace: Workspace | Served | None
) -> Cause | None:
    """Run the job's command; None if it succeeded. Raises LaunchError where it never ran.

    environment: this process's own, as programs are looked up where the command will find them.
    """
    settings = settings._replace(state_dir=usable(settings.state_dir))
    if settings.place:
        environment.update(use(settings.place, environment, settings.sync_wait))
    run = decide(settings.command, settings.launcher, settings.nnodes, torchrun.python())
    argv = torchrun.argv(run)
    say(f"{'under torchrun' if run.under_torchrun else 'as it is'}: {run.why}")
    fence = _fence(settings, pass_gate(settings.start_file, settings.attempt))
    wait_for_names(settings.hosts, settings.resolve_wait)
    with _copied(settings):
        if workspace is None:
            return _told(_run(settings, environment, argv, fence)[1])
        late = LATE_SECONDS if settings.server and settings.nnodes != "1" else 0.0
        reload = Reload(workspace, settings.start_file, settings.edit_wait, late)
        return _run_each_revision(settings, environment, argv, fence, reload)


def _fence(settings: Settings, unfenced: list[Worker]) -> list[Watchdog]:
    """Fence older gangs, and watch for newer ones from now on."""
    if not (settings.job_uid and settings.attempt):
        return []
    gang = GangId(settings.job_uid, int(settings.attempt))
    log = settings.termination_log
    watchdog = take_over(
        settings.state_dir, gang, settings.node, unfenced, lambda request: _end_now(log, request)
    )
    return [watchdog] if watchdog else []


def _run_each_revision(
    settings: Settings,
    environment: Mapping[str, str],
    argv: list[str],
    fence: list[Watchdog],
    reload: Reload,
) -> Cause | None:
    """Run the command, and again whenever there is newer code for it."""
    while True:
        own = rendezvous(environment, reload.workspace.revision)
        ended, cause = _run(settings, own, argv, fence, reload.asked)
        if not ended.for_reload:
            cause = _told(cause)
            lasting = ended.stopped_by is not None or ended.stop_request is not None
            if lasting or not reload.follows(failed=cause is not None):
                return cause
        reload.take()
        _enter(_directory(settings))
        say(f"starting the command again with revision {reload.workspace.revision}")


def _told(cause: Cause | None) -> Cause | None:
    if cause:
        say(f"failed with exit code {cause.exit_code}: {cause.message}")
    return cause


def _run(
    settings: Settings,
    environment: Mapping[str, str],
    argv: list[str],
    fence: list[Watchdog],
    reload: Callable[[], bool] | None = None,
) -> tuple[CommandExit, Cause | None]:
    """Supervise the command; what it left behind says why it failed."""
    reports = _folder_for_reports()
    kills = oom_kills()
    streams = _streams(settings)
    reporter = _reporter(settings, reports)
    watchdogs: list[Watchdog] = [*fence]
    if settings.hang_timeout:
        chunks = (lambda: streams.chunks) if streams else (lambda: 0)
        watchdogs.append(HangWatchdog(settings.hang_timeout, reports, chunks))
    try:
        variables = _environment_of_command(environment, reports, bool(settings.hang_timeout))
        ended = supervise(argv, variables, settings.grace, watchdogs, streams, reload)
        if streams:
            streams.close()
        cause = None if ended.for_reload else _cause(ended, reports, oom_kills() > kills)
        return ended, cause
    finally:
        if reporter:
            reporter.close()
        shutil.rmtree(reports, ignore_errors=True)


def _reporter(settings: Settings, reports: str) -> Reporter | None:
    if not (settings.progress_url and reports):
        return None
    return Reporter(settings.progress_url, settings.progress_token_file, reports)


def _cause(ended: CommandExit, reports: str, out_of_memory: bool) -> Cause | None:
    if ended.stop_request is not None:
        return _decided(ended.stop_request, out_of_memory)
    if ended.stopped_by is not None:
        return _stopped(ended.stopped_by)
    if ended.exit_code == 0:
        return None
    return find_cause(ended, read_reports(reports), time.time(), out_of_memory)


def _streams(settings: Settings) -> Streams | None:
    """Pipes for the command where somebody listens. A terminal stays the command's own."""
    if os.isatty(1) or not (settings.state_dir or settings.hang_timeout):
        return None
    return Streams(_hand_to_copies)


def _hand_to_copies(stream: int, data: bytes) -> None:
    for copy in output.copies:
        copy(stream, data)


@contextmanager
def _copied(settings: Settings) -> Iterator[None]:
    """What the command and the launcher write from here on is copied to the job's storage."""
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


def _directory(settings: Settings) -> str:
    return settings.working_dir or settings.workspace_target * bool(settings.workspace_source)


def _enter(directory: str) -> None:
    if not directory:
        return
    try:
        os.chdir(directory)
    except OSError as error:
        raise LaunchError(
            "WorkingDirMissing",
            f"cannot enter the working directory {directory}: {error.strerror}; workingDir must "
            "be a directory of the image, of a volume or of the workspace",
        ) from error


def _folder_for_reports() -> str:
    """A directory that the command's processes can write to, "" where there is none."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="torchrun-launch-")
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="reports-", dir=beside)
    return ""


def _environment_of_command(
    environment: Mapping[str, str], reports: str, stacks: bool
) -> dict[str, str]:
    """The pod's environment, output unbuffered, and what makes Python tell of its end."""
    hooks = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank")
    path = environment.get("PYTHONPATH", "")
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **environment,
        "PYTHONPATH": os.pathsep.join([hooks, path] if path else [hooks]),
        contract.LAUNCH_REPORTS: reports,
        **({contract.STACK_SIGNAL: str(int(STACK_SIGNAL))} if stacks else {}),
    }


def _decided(stop_request: StopRequest, out_of_memory: bool) -> Cause:
    code, reason, message = stop_request
    if out_of_memory:
        message += "; before that, the kernel killed one of its processes for memory"
    return Cause(code, None, None, reason, message, timestamp())


def _stopped(number: int) -> Cause:
    message = f"stopped by {signal_name(number)}, which was passed on to the command"
    return Cause(STOPPED, None, number, "Stopped", message, timestamp())


def _stop_now(log: str, number: int) -> None:
    """A signal before the command runs: there is nothing to pass it on to."""
    message = f"stopped by {signal_name(number)} before the command was started"
    say(message)
    send(descendants(os.getpid()), signal.SIGKILL)  # what the setup runs
    body = Cause(STOPPED, None, number, "Stopped", message, timestamp()).body()
    write_termination_message(log, body)
    os._exit(STOPPED)


def _end_now(log: str, stop_request: StopRequest) -> None:
    """End the ranks and this process, from a thread: whatever holds the main one does not count."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline and (left := descendants(os.getpid())):
        send(left, signal.SIGKILL)
        time.sleep(0.05)
    say(f"the ranks are killed: {stop_request.message}")
    write_termination_message(log, _decided(stop_request, out_of_memory=False).body())
    os._exit(stop_request.exit_code)
