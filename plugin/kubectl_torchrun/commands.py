"""The commands' work, from their options on."""

import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import msgspec

from kubectl_torchrun import manifest, pack, tree
from kubectl_torchrun.api import Api, ApiError, Unreachable, connect
from kubectl_torchrun.deliver import deliver
from kubectl_torchrun.errors import DETACHED, Problem, RunProblem, UploadProblem, UsageProblem
from kubectl_torchrun.explain import explain
from kubectl_torchrun.follow import MOST_STREAMS, Narrator, follow, latest_attempt
from kubectl_torchrun.kubectl import Target, namespace, proxy
from kubectl_torchrun.logs import merged
from kubectl_torchrun.manifest import Request
from kubectl_torchrun.mirror import Mirror, has_started, rank_of
from kubectl_torchrun.pack import Archive, human
from kubectl_torchrun.slices import JOBS, PODS, QUEUES, Job
from kubectl_torchrun.terminal import Terminal
from torchrun_api import names
from torchrun_api.json import JsonObject

T = TypeVar("T")


class Cluster(NamedTuple):
    """A namespace of a cluster within reach."""

    target: Target
    namespace: str
    socket: Path

    def run(self, work: Callable[[Api], Awaitable[T]]) -> T:
        """Do the work with a client. Raises Problem with what a user can do about a failure."""

        async def connected() -> T:
            async with connect(self.socket, self.namespace) as api:
                return await work(api)

        try:
            return anyio.run(connected)
        except Exception as error:
            problem = explain(error, self.namespace)
            if problem is None:
                raise
            raise problem from error

    def command(self, words: str) -> str:
        """A kubectl command line that means this namespace of this cluster."""
        flags = self.target.flags(namespace=False)
        return shlex.join(["kubectl", *words.split(), "-n", self.namespace, *flags])


class SubmitOptions(NamedTuple):
    """What `submit` was given beside the request itself."""

    directory: Path
    follow: bool
    dry_run: bool
    output: str
    wait: float


def submit(target: Target, request: Request, options: SubmitOptions, terminal: Terminal) -> int:
    """Pack, create, upload, follow; the exit code. Raises Problem."""
    if request.name:
        manifest.check_name(request.name)
    else:
        request = request._replace(name=manifest.generated_name(options.directory.resolve().name))
    found = tree.scan(options.directory)
    pack.check(found)
    where = namespace(target)
    with proxy(target) as socket, tempfile.TemporaryFile() as file:
        cluster = Cluster(target, where, socket)
        request = request._replace(queue=cluster.run(lambda api: _queue(api, request.queue)))
        _tell_left_out(found, terminal)
        archive = _pack(found, file, terminal)
        body = manifest.build(request, where, archive.sha256)
        if options.dry_run:
            cluster.run(lambda api: api.create(JOBS, body, dry_run=True))
            _print(body, options.output or "yaml")
            return 0
        delivery = Delivery(cluster, request.name, archive, terminal, options.wait)
        return delivery.run(body, output=options.output, follow_it=options.follow)


def sync(target: Target, name: str, directory: Path, wait: float, terminal: Terminal) -> int:
    """Upload the directory to a job that waits for it; the exit code. Raises Problem."""
    where = namespace(target)
    with proxy(target) as socket, tempfile.TemporaryFile() as file:
        cluster = Cluster(target, where, socket)
        job = cluster.run(lambda api: api.get(JOBS, name))
        _check_waits(job)
        found = tree.scan(directory)
        pack.check(found)
        _tell_left_out(found, terminal)
        archive = _pack(found, file, terminal)
        named = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
        if named not in ("", archive.sha256):
            terminal.note(
                f"{name} waits for another content of this directory; it shall take this one now."
            )
            key = names.WORKSPACE_SHA256
            cluster.run(lambda api: api.annotate(JOBS, name, key, archive.sha256))
        return Delivery(cluster, name, archive, terminal, wait).run()


def logs(
    target: Target, name: str, ranks: frozenset[int], terminal: Terminal, *, follow_it: bool
) -> int:
    """Print the logs of a job's ranks; the exit code (of the run with `follow_it`)."""
    where = namespace(target)
    with proxy(target) as socket:
        cluster = Cluster(target, where, socket)
        job = cluster.run(lambda api: api.get(JOBS, name))
        if not follow_it:
            cluster.run(lambda api: _print_logs(api, job, ranks, terminal))
            return 0

        async def work(api: Api) -> int:
            mirror = Mirror(api, name)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mirror.keep)
                narrator = Narrator(mirror, terminal)
                tasks.start_soon(narrator.run)
                code = await follow(api, mirror, terminal, narrator, ranks)
                tasks.cancel_scope.cancel()
            return code

        try:
            return cluster.run(work)
        except KeyboardInterrupt:
            terminal.interrupted()
            return DETACHED


async def _queue(api: Api, wanted: str) -> str:
    """The queue to use: the one asked for, else the only one."""
    try:
        queues = sorted(queue.metadata.name for queue in (await api.list(QUEUES)).items)
    except ApiError as error:
        if error.status == 403 and wanted:  # who may create jobs need not see queues
            return wanted
        raise
    if wanted in queues:
        return wanted
    if not queues:
        raise UsageProblem(
            f"There is no TorchrunQueue in the namespace {api.namespace}. Choose another with -n,"
            " or make a queue: kubectl get torchrunqueues -A shows those there are."
        )
    listed = "".join(f"\n  --queue {queue}" for queue in queues)
    if wanted:
        raise UsageProblem(
            f"There is no TorchrunQueue {wanted} in the namespace {api.namespace}."
            f" There are:{listed}"
        )
    if len(queues) > 1:
        raise UsageProblem(f"Say which queue the job goes to:{listed}")
    return queues[0]


async def _create(api: Api, body: JsonObject) -> None:
    """Create the job, also where the connection breaks at the wrong moment."""
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    name = str(metadata["name"])
    failures = 0
    until = anyio.current_time() + 60
    unsure = False
    while True:
        try:
            await api.create(JOBS, body)
        except (Unreachable, ApiError) as error:
            if unsure and isinstance(error, ApiError) and error.status == 409:
                job = await api.get(JOBS, name)
                if job.metadata.annotations == metadata["annotations"]:
                    return  # it was ours: the answer had been lost
                raise
            passes = isinstance(error, Unreachable) or error.passes
            if not passes or anyio.current_time() > until:
                raise
            unsure = unsure or isinstance(error, Unreachable)
            failures += 1
            await anyio.sleep(api.backoff.delay(failures))
        else:
            return


class Delivery:
    """An archive's way to its job, and the run that follows; knows at each moment what there is."""

    def __init__(
        self, cluster: Cluster, name: str, archive: Archive, terminal: Terminal, wait: float
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._archive = archive
        self._terminal = terminal
        self._wait = wait
        self._created = False
        self._uploaded = False

    def run(
        self, body: JsonObject | None = None, *, output: str = "", follow_it: bool = False
    ) -> int:
        """Create the job (with a body), upload, follow; the exit code. Raises Problem."""

        async def work(api: Api) -> int:
            if body is not None:
                await self._create(api, body, output)
            self._created = True
            return await self._upload_and_follow(api, follow_it)

        try:
            code = self._cluster.run(work)
        except KeyboardInterrupt:
            self._terminal.interrupted()
            self._terminal.note(self._stopped())
            return DETACHED
        except RunProblem as problem:
            raise RunProblem(f"{problem}\n{_give_up(self._cluster, self._name)}") from problem
        except Problem as problem:
            if self._uploaded:
                text = f"{problem}\nThe job goes on. {_later(self._cluster, self._name)}"
                raise type(problem)(text) from problem
            if self._created:
                text = f"{problem}\n{_resume(self._cluster, self._name)}"
                raise UploadProblem(text) from problem
            raise
        if not follow_it:
            self._terminal.note(_later(self._cluster, self._name))
        return code

    async def _create(self, api: Api, body: JsonObject, output: str) -> None:
        await _create(api, body)
        if output:
            _print(body, output)
        self._terminal.note(f"Created torchrunjob.torchrun.ai/{self._name}")

    async def _upload_and_follow(self, api: Api, follow_it: bool) -> int:
        mirror = Mirror(api, self._name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.keep)
            narrator = Narrator(mirror, self._terminal, frozenset({"WaitingForUpload"}))
            tasks.start_soon(narrator.run)
            await deliver(api, mirror, self._terminal, self._archive, pod_wait=self._wait)
            self._uploaded = True
            files, size = self._archive.files, human(self._archive.size)
            self._terminal.note(f"Uploaded {files:,} files, {size}")
            code = await follow(api, mirror, self._terminal, narrator) if follow_it else 0
            tasks.cancel_scope.cancel()
        return code

    def _stopped(self) -> str:
        if self._uploaded:
            return f"Detached; the job goes on. {_later(self._cluster, self._name)}"
        return f"Stopped before the upload was complete. {_resume(self._cluster, self._name)}"


def _later(cluster: Cluster, name: str) -> str:
    return (
        f"Come back:\n  {cluster.command(f'torchrun logs {name} --follow')}\n"
        f"  {cluster.command(f'get torchrunjob {name}')}\n"
        f"End it:\n  {cluster.command(f'delete torchrunjob {name}')}"
    )


def _resume(cluster: Cluster, name: str) -> str:
    return (
        f"The job waits for its workspace. Go on:\n  {cluster.command(f'torchrun sync {name}')}\n"
        f"{_give_up(cluster, name)}"
    )


def _give_up(cluster: Cluster, name: str) -> str:
    return f"Give it up:\n  {cluster.command(f'delete torchrunjob {name}')}"


def _check_waits(job: Job) -> None:
    name, workspace = job.metadata.name, job.spec.volumes.workspace
    if workspace is None or not workspace.enabled or workspace.source != "zip":
        raise UsageProblem(
            f"{name} takes no upload: it has no spec.volumes.workspace with source zip."
        )
    if job.workspace_ready or job.ended:
        raise UsageProblem(
            f"{name} has its workspace already (it is {job.status.phase})."
            " To run other code: kubectl torchrun submit"
        )


def _tell_left_out(found: tree.Tree, terminal: Terminal) -> None:
    for left_out in found.left_out[:8]:
        terminal.note(f"Left out: {left_out.path} ({left_out.why})")
    if len(found.left_out) > 8:
        terminal.note(f"Left out: {len(found.left_out) - 8} more")
    if any("secret" in left_out.why for left_out in found.left_out):
        terminal.note(f"To send such a file all the same, write !NAME in {tree.TORCHRUNIGNORE}")


def _pack(found: tree.Tree, file: BufferedRandom, terminal: Terminal) -> Archive:
    with terminal.bar("Packing", found.size) as bar:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            bar.reached(done)

        archive = pack.write(found, file, advance)
    terminal.note(
        f"Packed {archive.files:,} files of {found.root.name or '/'}:"
        f" {human(archive.unpacked)}, {human(archive.size)} as an archive"
    )
    return archive


async def _print_logs(api: Api, job: Job, ranks: frozenset[int], terminal: Terminal) -> None:
    selector = f"{names.JOB_LABEL}={job.metadata.name},{names.COMPONENT_LABEL}={names.WORKER}"
    pods = list((await api.list(PODS, {"labelSelector": selector})).items)
    chosen = [
        (rank_of(pod), pod.metadata.name)
        for pod in latest_attempt(pods)
        if (not ranks or rank_of(pod) in ranks) and has_started(pod, names.TRAINER_CONTAINER)
    ]
    if not chosen:
        status = job.status
        raise UsageProblem(
            f"{job.metadata.name} has no logs{' of these ranks' if ranks else ''}:"
            f" it is {status.phase or 'new'}. {status.reason}: {status.message}"
        )
    if len(chosen) > MOST_STREAMS:
        terminal.note(
            f"The first {MOST_STREAMS} of {len(chosen)} workers; choose others with --rank."
        )
    async for rank, line in merged(api, chosen[:MOST_STREAMS]):
        terminal.log(rank, line)


def _print(body: JsonObject, output: str) -> None:
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    if output == "name":
        text = f"torchrunjob.torchrun.ai/{metadata['name']}\n"
    elif output == "json":
        text = msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
    else:
        import yaml

        text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
    sys.stdout.write(text)
    sys.stdout.flush()
