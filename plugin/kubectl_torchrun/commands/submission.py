"""The commands' work, from their options on."""

from pathlib import Path
from typing import NamedTuple

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster import wait
from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable
from kubectl_torchrun.cluster.kubectl import Target, Where, proxy, resolve
from kubectl_torchrun.cluster.mirror import Mirror
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JOBS, QUEUES, Job
from kubectl_torchrun.commands import interrupt
from kubectl_torchrun.errors import DETACHED, Problem, RunProblem, UploadProblem, UsageProblem
from kubectl_torchrun.logs.follow import Narrator, follow
from kubectl_torchrun.terminal import Terminal
from kubectl_torchrun.upload import job_manifest, pack, refetch, tree, upload_token
from kubectl_torchrun.upload.cache import Memory, Sent, Workspace
from kubectl_torchrun.upload.deliver import deliver
from kubectl_torchrun.upload.job_manifest import Request
from kubectl_torchrun.upload.pack import files_of, human
from kubectl_torchrun.upload.reload import Reload
from torchrun_api import names
from torchrun_api.json import JsonObject

FETCHED = ("git", "s3")  # sources that a job fetches by itself
FETCH_SECONDS = 600.0


class SubmitOptions(NamedTuple):
    """What `submit` was given beside the request itself."""

    directory: Path
    follow: bool
    dry_run: str  # none, client or server
    output: str
    pod_wait: float  # seconds for the pod that takes the upload
    wait: str = ""  # a phase or condition, where nothing is followed
    timeout: float | None = None
    deletes: bool = False  # whether a second Ctrl-C deletes the job
    watch: bool = False  # whether each edit is sent
    overlay: Path | None = None  # a directory whose files are laid over the one that is sent


def submit(target: Target, request: Request, options: SubmitOptions, terminal: Terminal) -> int:
    """Pack, create, upload, follow; the exit code. Raises Problem."""
    if request.name:
        job_manifest.check_name(request.name)
    else:
        request = request._replace(
            name=job_manifest.generated_name(options.directory.resolve().name)
        )
    if options.wait:
        options = options._replace(wait=wait.check(options.wait))
    found = tree.scan(options.directory, options.overlay)
    pack.check(found)
    where = resolve(target)
    if options.dry_run == "client":
        return _print_only(request, where, found, options, terminal)
    with proxy(target) as socket:
        cluster = Cluster(target, where.namespace, socket)
        request = request._replace(queue=cluster.run(lambda api: _queue(api, request.queue)))
        tell_left_out(found, terminal)
        memory = Memory(where, options.directory)
        workspace = look(memory, found, terminal)
        base = workspace.before.job if workspace.before else ""
        token = upload_token.upload_token(where, request.name)
        said = upload_token.announced(token)
        sha256 = workspace.manifest.sha256
        body = job_manifest.build(request, where.namespace, sha256, base, said)
        if options.dry_run == "server":
            cluster.run(lambda api: api.create(JOBS, body, dry_run=True))
            output.write(body, options.output or "yaml")
            return 0
        delivery = Delivery(cluster, request.name, workspace, memory, terminal, options, token)
        return delivery.run(body)


def _print_only(
    request: Request, where: Where, found: tree.Tree, options: SubmitOptions, terminal: Terminal
) -> int:
    if not request.queue:
        raise UsageProblem("--dry-run=client asks no cluster: say which queue with --queue.")
    workspace = look(Memory(where, options.directory), found, terminal)
    body = job_manifest.build(request, where.namespace, workspace.manifest.sha256)
    output.write(body, options.output or "yaml")
    return 0


def sync(target: Target, name: str, options: SubmitOptions, terminal: Terminal) -> int:
    """Upload the directory to a job that waits for it, or runs; the exit code. Raises Problem.

    A job that fetches its workspace by itself is told to do so once more.
    """
    where = resolve(target)
    with proxy(target) as socket:
        cluster = Cluster(target, where.namespace, socket)
        job = cluster.run(lambda api: api.get(JOBS, name))
        _check_takes(job, cluster)
        source = _source(job)
        if source in FETCHED:
            if job.status.phase == "Running":
                return cluster.run(lambda api: refetch.refetch(api, job, terminal, FETCH_SECONDS))
            cluster.run(lambda api: refetch.ask(api, name))
            when = "with its next workers" if job.workspace_ready else "now"
            terminal.note(f"{name} fetches its workspace from {source} again, {when}.")
            return 0
        memory = Memory(where, options.directory)
        token = upload_token.upload_token(where, name)
        if job.workspace_ready or options.watch:
            edits = Reload(
                cluster,
                name,
                options.directory,
                memory,
                terminal,
                options.pod_wait,
                token,
                options.overlay,
            )
            return edits.watch() if options.watch else edits.once()
        found = tree.scan(options.directory, options.overlay)
        pack.check(found)
        tell_left_out(found, terminal)
        workspace = look(memory, found, terminal)
        sha256 = workspace.manifest.sha256
        named = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
        if named not in ("", sha256):
            terminal.note(
                f"{name} waits for another content of this directory; it shall take this one now."
            )
        if named != sha256:
            said = {
                names.WORKSPACE_SHA256: sha256,
                names.UPLOAD_TOKEN_SHA256: upload_token.announced(token),
            }
            cluster.run(lambda api: api.annotate(JOBS, name, said))
        return Delivery(cluster, name, workspace, memory, terminal, options, token).run()


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
            " or make a queue: kubectl torchrun queues -A shows those there are."
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
    """A workspace's way to its job, and the run that follows; knows at any moment what there is."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        workspace: Workspace,
        memory: Memory,
        terminal: Terminal,
        options: SubmitOptions,
        token: str,
    ) -> None:
        self._cluster = cluster
        self._token = token
        self._name = name
        self._workspace = workspace
        self._memory = memory
        self._terminal = terminal
        self._options = options
        self._created = False
        self._uploaded = False

    def run(self, body: JsonObject | None = None) -> int:
        """Create the job (with a body), upload, follow; the exit code. Raises Problem."""

        async def work(api: Api) -> int:
            if body is not None:
                await self._create(api, body)
            self._created = True
            return await self._upload_and_follow(api)

        try:
            code = self._cluster.run(work)
        except KeyboardInterrupt:
            return self._interrupted()
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
        if not (self._options.follow or self._options.wait):
            self._terminal.note(_later(self._cluster, self._name))
        return code

    async def _create(self, api: Api, body: JsonObject) -> None:
        await _create(api, body)
        if self._options.output:
            output.write(body, self._options.output)
        self._terminal.note(f"Created torchrunjob.torchrun.ai/{self._name}")
        spec = body["spec"]
        if isinstance(spec, dict) and spec.get("development"):
            watch = self._cluster.command(f"torchrun sync {self._name} --watch")
            self._terminal.note(f"To send each edit, in another terminal:\n  {watch}")

    async def _upload_and_follow(self, api: Api) -> int:
        options, terminal = self._options, self._terminal
        mirror = Mirror(api, self._name)
        code = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.keep)
            narrator = Narrator(mirror, terminal, frozenset({"WaitingForUpload"}))
            tasks.start_soon(narrator.run)
            done = await deliver(
                api, mirror, terminal, self._workspace, pod_wait=options.pod_wait, token=self._token
            )
            self._uploaded = True
            self._memory.remember(Sent(self._name, self._workspace.manifest))
            terminal.note(f"Uploaded {files_of(done.files)}, {human(done.sent)}")
            if options.follow:
                code = await follow(api, mirror, terminal, narrator)
            tasks.cancel_scope.cancel()
        if options.wait:
            code = await wait.wait(api, self._name, terminal, options.wait, options.timeout)
        return code

    def _interrupted(self) -> int:
        self._terminal.interrupted()
        if self._options.deletes:
            return interrupt.ask(self._cluster, self._name, self._terminal, self._stopped())
        self._terminal.note(self._stopped())
        return DETACHED

    def _stopped(self) -> str:
        if self._uploaded:
            return f"Detached; the job goes on. {_later(self._cluster, self._name)}"
        if self._created:
            return f"Stopped before the upload was complete. {_resume(self._cluster, self._name)}"
        return (
            "Stopped while the job was being created: it may be there or not. See:\n"
            f"  {self._cluster.command(f'torchrun status {self._name}')}"
        )


def _later(cluster: Cluster, name: str) -> str:
    return (
        f"Come back:\n  {cluster.command(f'torchrun logs {name} --follow')}\n"
        f"  {cluster.command(f'torchrun status {name}')}\n"
        f"End it:\n  {cluster.command(f'torchrun cancel {name}')}"
    )


def _resume(cluster: Cluster, name: str) -> str:
    return (
        f"The job waits for its workspace. Go on:\n  {cluster.command(f'torchrun sync {name}')}\n"
        f"{_give_up(cluster, name)}"
    )


def _give_up(cluster: Cluster, name: str) -> str:
    return f"Give it up:\n  {cluster.command(f'torchrun cancel {name}')}"


def _source(job: Job) -> str:
    """Where the job's workspace comes from; `none` where it has none."""
    workspace = job.spec.volumes.workspace
    return workspace.source if workspace and workspace.enabled else "none"


def _check_takes(job: Job, cluster: Cluster) -> None:
    """Raises UsageProblem where a directory, or word of a new one, comes to nothing."""
    name, source = job.metadata.name, _source(job)
    claim = job.spec.volumes.workspace.claim_name if job.spec.volumes.workspace else ""
    if job.ended:
        raise UsageProblem(
            f"{name} is over (it is {job.status.phase}). To run other code:"
            f" {cluster.command('torchrun submit')}"
        )
    if source == "none":
        raise UsageProblem(
            f"{name} has no workspace (spec.volumes.workspace): its code is in its image, so there"
            " is nowhere to send a directory to. A job that takes one:"
            f" {cluster.command('torchrun submit')}"
        )
    if source == "existing":
        raise UsageProblem(
            f"{name} takes no upload: its workspace is the claim {claim} (source existing), read as"
            " it is; change the files there."
        )


def tell_left_out(found: tree.Tree, terminal: Terminal) -> None:
    """Say what is not sent although no ignore file names it."""
    for left_out in found.left_out[:8]:
        terminal.note(f"Left out: {left_out.path} ({left_out.why})")
    if len(found.left_out) > 8:
        terminal.note(f"Left out: {len(found.left_out) - 8} more")
    if any("secret" in left_out.why for left_out in found.left_out):
        terminal.note(f"To send such a file all the same, write !NAME in {tree.TORCHRUNIGNORE}")


def look(memory: Memory, found: tree.Tree, terminal: Terminal) -> Workspace:
    """The directory's files by their digests. Raises UsageProblem."""
    with terminal.bar("Reading", found.size) as bar:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            bar.reached(done)

        workspace = memory.look(found, advance)
    size = human(workspace.manifest.size)
    terminal.note(f"{files_of(workspace.manifest.files)} in {found.root.name or '/'}, {size}")
    return workspace
