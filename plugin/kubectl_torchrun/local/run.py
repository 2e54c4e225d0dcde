"""Run a job on this machine, from its start to its result.

The controller's reconcile decides, as on a cluster. Its Plan is carried out with processes: a pod
of the gang is a launcher with the environment of that pod.
"""

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec.structs import replace

from kubectl_torchrun.cluster.job_watch import JobState
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.repeated_failure import find_repeated_failure
from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.cluster.summary import describe_checkpoint, status_lines
from kubectl_torchrun.errors import (
    DETACHED,
    REPEATED_FAILURE,
    RUN_FAILED,
    SUCCEEDED,
    Problem,
    RunProblem,
    UsageProblem,
)
from kubectl_torchrun.local import edits, requirements
from kubectl_torchrun.local.environment import (
    NodePlaces,
    environment_of,
    missing_values,
    write_annotations,
)
from kubectl_torchrun.local.job import devices_of, job_and_queue
from kubectl_torchrun.local.node import LocalNode
from kubectl_torchrun.local.objects import LocalObjects, Stop
from kubectl_torchrun.local.progress_port import ProgressPort
from kubectl_torchrun.logs.progress_line import progress_line
from kubectl_torchrun.logs.torchrun_report import ReportFolder, StampedLine
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload import job_manifest
from kubectl_torchrun.upload.command_warning import warn_of_command
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.json import object_at, objects_at
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.status import Progress
from torchrun_controller.reconcile import Apply, Defaults, Delete, Plan, StatusWrite, reconcile
from torchrun_controller.reconcile.gang.checkpoints import merge
from torchrun_controller.reconcile.model.observed import ProgressReport
from torchrun_controller.reconcile.pods.lifecycle import index_of

FOLDER = ".torchrun"  # in the directory of the run, for state and checkpoints
_KEPT_RUNS = 10
_LAST_LINES_SECONDS = 1.0  # for output of processes that a launcher has left behind
# Only Ctrl-C and a repeated failure suspend a run on this machine, and say so.
_OF_SUSPENSION = frozenset({"Suspending", "Suspended"})
_MIN_WAIT, _MAX_WAIT = 0.05, 3600.0


class LocalOptions(NamedTuple):
    """Options of a run on this machine.

    reload: each edit restarts the command. status_file: gets the last status of the job, as JSON.
    """

    directory: Path
    gpus_per_node: int | None = None
    reload: bool = False
    raw: bool = False
    stop_on_repeated_failure: bool = False
    status_file: Path | None = None


def run(request: Request, options: LocalOptions, terminal: Display) -> int:
    """Run the job until it ends; the exit code. Raises Problem."""
    name = request.name or job_manifest.generated_name(options.directory.resolve().name)
    job_manifest.check_name(name)
    job, queue, ignored = job_and_queue(request._replace(name=name), options.gpus_per_node, _now())
    if ignored:
        terminal.note(f"Not used on this machine: {', '.join(ignored)}.")
    warn_of_command(msgspec.to_builtins(job.spec), terminal)
    env = [msgspec.to_builtins(variable) for variable in job.spec.env]
    missing = [each for each in missing_values(env) if each not in os.environ]
    if missing:
        raise UsageProblem(
            f"Set {', '.join(missing)} in your shell: spec.env takes the value from an object of a"
            " cluster, which a run on this machine does not have."
        )
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        local = _LocalRun(LocalObjects(job, queue), options, Path(folder), terminal)
        try:
            return anyio.run(local.run)
        except BaseExceptionGroup as group:
            problems, _ = group.split(Problem)
            if problems is None:
                raise
            raise _first(problems) from group


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


class _LocalRun:
    """One run: its objects, and the processes of its nodes."""

    def __init__(
        self, objects: LocalObjects, options: LocalOptions, folder: Path, terminal: Display
    ) -> None:
        self._objects = objects
        self._options = options
        self._directory = options.directory.resolve()
        self._folder = folder
        self._terminal = terminal
        self._name = objects.job.metadata.name
        self._nodes: dict[str, LocalNode] = {}  # by the UID of the pod
        self._changed = False
        self._revision = 0
        self._interrupts = 0
        self._end_code: int | None = None  # of a run that was stopped from outside
        self._watch = JobState()
        self._setup: dict[str, str] = {}
        self._gang_key = secrets.token_hex()

    async def run(self) -> int:
        """Reconcile until the job has ended and no process is left; the exit code."""
        self._prepare_folder()
        loop = asyncio.get_running_loop()

        def received(uid: str, report: ProgressReport) -> None:
            loop.call_soon_threadsafe(self._received, uid, report)

        self._port = ProgressPort(received)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        narrator = Narrator(self._watch, self._terminal, _OF_SUSPENSION)
        try:
            await self._install()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(narrator.run)
                if self._options.reload:
                    tasks.start_soon(edits.watch, self._directory, self._edited)
                    self._terminal.note(f"Watching {self._directory}. Press Ctrl-C to stop.")
                await self._reconcile(tasks)
                tasks.cancel_scope.cancel()
        finally:
            for node in self._nodes.values():
                node.kill()
            self._port.close()
            narrator.catch_up()
            self._terminal.at_rest()
        return self._result()

    async def _reconcile(self, tasks: TaskGroup) -> None:
        defaults = Defaults(runtime_image="local", progress_url=self._port.url)
        while True:
            self._changed = False
            plan = reconcile(self._objects.observed(), _now(), defaults)
            has_written = self._carry_out(plan, tasks)
            job = self._slice()
            self._watch.job = job
            self._watch.wake()
            self._check_repeated_failure(job)
            if has_written or self._changed:
                continue
            is_over = job.has_ended or self._end_code is not None
            if is_over and not self._nodes:
                return
            wait = _MAX_WAIT if plan.requeue_after is None else plan.requeue_after
            await self._watch.next_change(max(wait, _MIN_WAIT))

    def _carry_out(self, plan: Plan, tasks: TaskGroup) -> bool:
        """Carry out the writes in their order; whether there were any."""
        has_written = False
        for write in plan.writes:
            match write:
                case Apply():
                    for pod in self._objects.apply(write, _now()):
                        tasks.start_soon(self._run_node, pod, tasks)
                    self._write_annotations(write.uid)
                case Delete():
                    self._stop_all(self._objects.delete(write, _now()), tasks)
                case StatusWrite():
                    if write.status is None:
                        continue
                    self._objects.write_status(write.status)
            has_written = True
        return has_written

    async def _run_node(self, pod: Pod, tasks: TaskGroup) -> None:
        """Run the launcher of a pod, print its output, and record how it ended."""
        uid, index = pod.metadata.uid, index_of(pod)
        places = self._places(uid)
        places.folder.mkdir()
        places.termination_log.touch()
        places.token.write_text(self._port.new_token(uid))
        self._write_annotations(uid)
        try:
            node = await LocalNode.start(
                self._launcher(), self._directory, self._environment(pod, places)
            )
        except OSError as error:
            raise RunProblem(f"Cannot start {self._launcher()[0]}: {error.strerror}") from error
        self._nodes[uid] = node
        self._objects.starts(uid, _now())
        self._wake()
        code = await self._follow(node, index)
        message = places.termination_log.read_text(errors="replace")
        del self._nodes[uid]
        self._stop_all(self._objects.ends(uid, code, message, _now()), tasks)
        self._wake()

    async def _follow(self, node: LocalNode, index: int) -> int:
        """Print the output of a node until it ends; its exit code."""
        is_read = anyio.Event()

        async def read() -> None:
            folder = ReportFolder()
            async for text in node.lines():
                line = StampedLine(b"", text)
                self._print(index, [line] if self._options.raw else folder.feed(line))
            self._print(index, folder.release())
            is_read.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            code = await node.wait()
            with anyio.move_on_after(_LAST_LINES_SECONDS):
                await is_read.wait()
            tasks.cancel_scope.cancel()
        return code

    def _print(self, index: int, lines: list[StampedLine]) -> None:
        for line in lines:
            self._terminal.log(index, line.text)

    def _stop_all(self, stops: tuple[Stop, ...], tasks: TaskGroup) -> None:
        for stop in stops:
            node = self._nodes.get(stop.pod.metadata.uid)
            if node is not None:
                tasks.start_soon(node.stop, stop.grace)

    def _environment(self, pod: Pod, places: NodePlaces) -> dict[str, str]:
        owner = pod.metadata.owner_references[0].uid
        spec = object_at(self._objects.templates[owner], "spec")
        (container,) = objects_at(spec, "containers")
        index, gpus = index_of(pod), self._objects.queue.spec.node_resources.gpus
        devices = devices_of(index, gpus)
        variables = objects_at(container, "env")
        environment = environment_of(variables, index, places, os.environ, devices)
        return {**environment, **self._setup, launch.GANG_KEY.name: self._gang_key}

    def _places(self, uid: str) -> NodePlaces:
        root = self._directory / FOLDER
        return NodePlaces(
            folder=self._folder / uid,
            directory=self._directory,
            state=root / "runs" / self._name,
            checkpoints=root / "checkpoints" / self._name,
        )

    def _write_annotations(self, uid: str) -> None:
        places = self._places(uid)
        if uid in self._objects.annotations and places.folder.is_dir():
            annotations = dict(self._objects.annotations[uid])
            if self._options.reload:
                annotations[names.REVISION] = str(self._revision)
                annotations[names.DEVELOPMENT] = "true"
            write_annotations(places.annotations, annotations)

    def _launcher(self) -> list[str]:
        package = find_spec("torchrun_runtime.launch")
        assert package is not None
        assert package.origin is not None
        return [requirements.python(), str(Path(package.origin).parent)]

    async def _install(self) -> None:
        """Create the job's Python environment, as a setup pod does. Raises RunProblem."""
        setup = requirements.variables(self._objects.job.spec, self._directory)
        if not setup:
            return
        log = self._folder / "setup"
        log.touch()
        environment = {
            **os.environ,
            **setup,
            launch.TERMINATION_LOG.name: str(log),
            launch.COMMAND.name: '"setup"',  # not read, but required
            launch.WORKING_DIR.name: str(self._directory),
        }
        node = await LocalNode.start([*self._launcher(), "setup"], self._directory, environment)
        self._nodes["setup"] = node
        code = await self._follow(node, 0)
        del self._nodes["setup"]
        if code:
            raise RunProblem(f"The setup failed: {log.read_text() or f'exit code {code}'}")
        self._setup = setup

    def _received(self, uid: str, report: ProgressReport) -> None:
        """Take a report of the launcher in this pod."""
        owner = self._objects.find_owner(uid)
        if owner is None:
            return
        if report.checkpoints is not None:
            self._objects.checkpoints = merge(self._objects.checkpoints, report.checkpoints)
        elif report.restarts_in_place is not None:
            self._objects.restarts[owner] = report.restarts_in_place
        else:
            self._objects.progress[owner] = Progress(
                step=report.step,
                total_steps=report.total_steps,
                loss=report.loss,
                samples_per_second=report.samples_per_second,
                time=_now(),
            )
        self._wake()

    def _edited(self) -> None:
        """Announce a new revision of the code to the launchers."""
        self._revision += 1
        for uid in self._nodes:
            self._write_annotations(uid)

    def _interrupt(self) -> None:
        """Stop the run at the first Ctrl-C, and kill it at the second one."""
        self._interrupts += 1
        self._terminal.interrupted()
        if self._interrupts == 1:
            self._terminal.note("Stopping the run. Press Ctrl-C again to kill it.")
            self._stop_run(DETACHED)
        else:
            for node in self._nodes.values():
                node.kill()

    def _check_repeated_failure(self, job: JobSlice) -> None:
        if not self._options.stop_on_repeated_failure or self._end_code is not None:
            return
        repeated = find_repeated_failure(job)
        if repeated is not None:
            self._terminal.at_rest()
            self._terminal.note(f"Stopped. {repeated.describe()}")
            self._stop_run(REPEATED_FAILURE)

    def _stop_run(self, code: int) -> None:
        """Suspend the job: its ranks get SIGTERM and the grace period."""
        self._end_code = code
        job = self._objects.job
        self._objects.job = replace(job, spec=replace(job.spec, suspend=True))
        self._wake()

    def _result(self) -> int:
        """Print why the run failed; the exit code."""
        job = self._slice()
        if self._options.status_file is not None:
            self._options.status_file.write_bytes(msgspec.json.encode(self._objects.job.status))
        if self._end_code is not None:
            if job.status.last_checkpoint is not None:
                last = describe_checkpoint(job.status.last_checkpoint)
                self._terminal.note(f"The last checkpoint is of {last}")
            return self._end_code
        if job.status.phase == "Succeeded":
            return SUCCEEDED
        self._terminal.note("")
        for line in status_lines(job):
            self._terminal.note(line)
        if job.status.progress is not None:
            self._terminal.note(f"  progress: {progress_line(job.status)}")
        return RUN_FAILED

    def _slice(self) -> JobSlice:
        return msgspec.json.decode(msgspec.json.encode(self._objects.job), type=JobSlice)

    def _wake(self) -> None:
        self._changed = True
        self._watch.wake()

    def _prepare_folder(self) -> None:
        """Create the folder of state and checkpoints, which git and uploads leave out."""
        root = self._directory / FOLDER
        try:
            (root / "runs").mkdir(parents=True, exist_ok=True)
            (root / ".gitignore").write_text("*\n")
            places = self._places("")
            places.checkpoints.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(places.state, ignore_errors=True)
            places.state.mkdir(parents=True)
            old = sorted((root / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
            for path in old[:-_KEPT_RUNS]:
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise UsageProblem(f"Cannot write to {root}: {error.strerror}") from error


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
