"""Submit a job: create it, upload its workspace, follow it."""

import time
from pathlib import Path
from typing import NamedTuple

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster import wait
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import ClusterNamespace, Target, resolve
from kubectl_torchrun.cluster.narrator import Narrator
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, QUEUES
from kubectl_torchrun.errors import (
    DETACHED,
    REPEATED_FAILURE,
    ClusterProblem,
    Problem,
    RunProblem,
    UploadProblem,
    UsageProblem,
)
from kubectl_torchrun.logs.follow import follow
from kubectl_torchrun.logs.streams import View
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.text import files_of, human
from kubectl_torchrun.upload import consent, job_manifest, pack, tree, upload_token
from kubectl_torchrun.upload.cache import LastUpload, UploadCache, Workspace
from kubectl_torchrun.upload.command_warning import warn_of_command
from kubectl_torchrun.upload.deliver import deliver
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api import names
from torchrun_api.json import JsonObject, object_at

ASK_SECONDS = 5.0  # for a second Ctrl-C
_CREATE_SECONDS = 60.0
# That `job_manifest.build` sets: together they identify one call of this command.
_OWN_ANNOTATIONS = (names.WORKSPACE_SHA256, names.UPLOAD_TOKEN_SHA256, names.WORKSPACE_BASE)


class SubmitOptions(NamedTuple):
    """Options of submit, run and sync. Times in seconds.

    overlay: a directory whose files replace those of the same path. sync_arguments: of a `sync`
    that uploads the same files, for messages. pod_wait: limit for the pod that receives the upload.
    wait: a phase or condition, if follow is False; timeout: limit of wait, None without. deletes:
    whether a second Ctrl-C deletes the job. raw: logs are not folded. stop_on_repeated_failure:
    None if it depends on the terminal.
    """

    directory: Path
    pod_wait: float
    overlay: Path | None = None
    sync_arguments: tuple[str, ...] = ()
    follow: bool = False
    dry_run: str = "none"  # none, client or server
    form: str = ""  # of the job on stdout: name, yaml or json
    wait: str = ""
    timeout: float | None = None
    deletes: bool = False
    raw: bool = False
    stop_on_repeated_failure: bool | None = None


def submit(target: Target, request: Request, options: SubmitOptions, terminal: Display) -> int:
    """Create the job, upload the directory, follow; the exit code. Raises Problem."""
    if request.name:
        job_manifest.check_name(request.name)
    else:
        name = job_manifest.generated_name(options.directory.resolve().name)
        request = request._replace(name=name)
    if options.wait:
        options = options._replace(wait=wait.check(options.wait))
    files = consent.scan(options.directory, options.overlay)
    pack.check(files)
    if options.dry_run == "client":
        return _print_manifest(request, _where(target), files, options, terminal)
    with session(target) as cluster:
        request = request._replace(queue=cluster.run(lambda api: select_queue(api, request.queue)))
        tree.note_skipped(files, terminal)
        cache = UploadCache(cluster.where, options.directory)
        workspace = read_workspace(cache, files, terminal)
        base = workspace.previous.job if workspace.previous else ""
        token = upload_token.upload_token(cluster.where, request.name)
        body = job_manifest.build(
            request,
            cluster.namespace,
            workspace.manifest.sha256,
            base,
            upload_token.token_sha256(token),
        )
        warn_of_command(object_at(body, "spec"), terminal, files)
        if options.dry_run == "server":
            cluster.run(lambda api: api.create(JOBS, body, dry_run=True))
            output.write(body, options.form or "yaml")
            return 0
        submission = Submission(cluster, request.name, workspace, cache, terminal, options, token)
        return submission.run(body)


def _where(target: Target) -> ClusterNamespace:
    """The selected namespace; with --namespace also without a cluster. Raises ClusterProblem."""
    try:
        return resolve(target).where
    except ClusterProblem:
        if target.namespace:
            return ClusterNamespace("", target.namespace)
        raise


def _print_manifest(
    request: Request,
    namespace: ClusterNamespace,
    files: tree.Tree,
    options: SubmitOptions,
    terminal: Display,
) -> int:
    if not request.queue:
        raise UsageProblem("--dry-run=client does not connect to a cluster. Add --queue.")
    workspace = read_workspace(UploadCache(namespace, options.directory), files, terminal)
    body = job_manifest.build(request, namespace.name, workspace.manifest.sha256)
    warn_of_command(object_at(body, "spec"), terminal, files)
    output.write(body, options.form or "yaml")
    return 0


async def select_queue(api: Api, flag: str) -> str:
    """The queue of the flag, else the only queue. Raises UsageProblem."""
    try:
        queues = sorted(queue.metadata.name for queue in (await api.list(QUEUES)).items)
    except RequestError as error:
        if error.status == 403 and flag:  # permission to create jobs does not include queues
            return flag
        raise
    if flag in queues:
        return flag
    if not queues:
        raise UsageProblem(
            f"Namespace {api.namespace} has no TorchrunQueue. Select another namespace with -n, or"
            " create a queue. List all queues: kubectl torchrun queues -A"
        )
    listed = "".join(f"\n  --queue {queue}" for queue in queues)
    if flag:
        raise UsageProblem(
            f"TorchrunQueue {flag} not found in namespace {api.namespace}. Use one of:{listed}"
        )
    if len(queues) > 1:
        raise UsageProblem(f"The namespace has several queues. Select one:{listed}")
    return queues[0]


async def create(api: Api, body: JsonObject) -> None:
    """Create the job. After an unknown result, retry; 409 is then success if the job is ours."""
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    annotations = metadata["annotations"]
    assert isinstance(annotations, dict)
    # A webhook may change other annotations.
    ours = {key: annotations.get(key) for key in _OWN_ANNOTATIONS}
    name = str(metadata["name"])
    failures = 0
    until = anyio.current_time() + _CREATE_SECONDS
    may_exist = False
    while True:
        try:
            await api.create(JOBS, body)
        except (Unreachable, RequestError) as error:
            if may_exist and isinstance(error, RequestError) and error.status == 409:
                existing = (await api.get(JOBS, name)).metadata.annotations
                if {key: existing.get(key) for key in _OWN_ANNOTATIONS} == ours:
                    return
                raise
            retriable = isinstance(error, Unreachable) or error.retriable
            if not retriable or anyio.current_time() > until:
                raise
            # After 500 or 504 the object may be stored. 429 comes before any work.
            may_exist = may_exist or isinstance(error, Unreachable) or error.status != 429
            failures += 1
            await anyio.sleep(api.backoff.delay(failures))
        else:
            return


class Submission:
    """One job from its creation to the end of the command, with messages for an early end."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        workspace: Workspace,
        cache: UploadCache,
        terminal: Display,
        options: SubmitOptions,
        token: str,
    ) -> None:
        self._cluster = cluster
        self._token = token
        self._name = name
        self._workspace = workspace
        self._cache = cache
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
            raise RunProblem(f"{problem}\n{_cancel_hint(self._cluster, self._name)}") from problem
        except Problem as problem:
            if self._uploaded:
                text = f"{problem}\nThe job continues. {_follow_hint(self._cluster, self._name)}"
                raise type(problem)(text) from problem
            if self._created:
                text = f"{problem}\n{self._resume_hint()}"
                raise UploadProblem(text) from problem
            raise
        if code == REPEATED_FAILURE:
            resume = self._cluster.command(f"torchrun resume {self._name}")
            self._terminal.note(
                f"Fix the code, then submit it again. To restart this job:\n  {resume}\n"
                f"{_cancel_hint(self._cluster, self._name)}"
            )
        if not (self._options.follow or self._options.wait):
            self._terminal.note(_follow_hint(self._cluster, self._name))
        return code

    async def _create(self, api: Api, body: JsonObject) -> None:
        await create(api, body)
        if self._options.form:
            output.write(body, self._options.form)
        self._terminal.note(f"Created torchrunjob.torchrun.ai/{self._name}")
        spec = body["spec"]
        if isinstance(spec, dict) and spec.get("development"):
            watch = self._sync_command("--watch")
            self._terminal.note(f"To upload each edit, run in another terminal:\n  {watch}")

    async def _upload_and_follow(self, api: Api) -> int:
        options, terminal = self._options, self._terminal
        job_watch = JobWatch(api, self._name)
        code = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job_watch.run)
            narrator = Narrator(job_watch, terminal, frozenset({"WaitingForUpload"}))
            tasks.start_soon(narrator.run)
            done = await deliver(
                api,
                job_watch,
                terminal,
                self._workspace,
                pod_wait=options.pod_wait,
                token=self._token,
            )
            self._uploaded = True
            self._cache.record(LastUpload(self._name, self._workspace.manifest))
            terminal.note(f"Uploaded {files_of(done.files)}, {human(done.sent_bytes)}")
            if options.follow:
                stop = options.stop_on_repeated_failure
                code = await follow(
                    api,
                    job_watch,
                    terminal,
                    narrator,
                    View(raw=options.raw),
                    stop_on_repeated_failure=terminal.live if stop is None else stop,
                )
            tasks.cancel_scope.cancel()
        if options.wait:
            code = await wait.wait(api, self._name, terminal, options.wait, options.timeout)
        return code

    def _interrupted(self) -> int:
        """Handle Ctrl-C: print the next step; with `deletes`, a second Ctrl-C deletes the job.

        Not before the job is known to be created: there may be another one of this name.
        """
        terminal, name = self._terminal, self._name
        terminal.interrupted()
        if not (self._options.deletes and self._created and self._second_interrupt()):
            terminal.note(self._stop_message())
            return DETACHED
        try:
            self._cluster.run(lambda api: api.delete(JOBS, name))
        except KeyboardInterrupt:
            terminal.interrupted()
            see = self._cluster.command(f"torchrun status {name}")
            terminal.note(
                f"Stopped while job {name} was being deleted. Check that it is gone:\n  {see}"
            )
            return DETACHED
        terminal.note(f"Deleted torchrunjob.torchrun.ai/{name}. Its pods get a grace period.")
        return DETACHED

    def _second_interrupt(self) -> bool:
        """Whether another Ctrl-C comes within ASK_SECONDS."""
        try:
            self._terminal.note(
                f"Detaching. Press Ctrl-C again within {ASK_SECONDS:.0f} s to delete job"
                f" {self._name}."
            )
            time.sleep(ASK_SECONDS)
        except KeyboardInterrupt:
            self._terminal.interrupted()
            return True
        return False

    def _stop_message(self) -> str:
        if self._uploaded:
            return f"Detached. The job continues. {_follow_hint(self._cluster, self._name)}"
        if self._created:
            return f"Stopped before the upload was complete. {self._resume_hint()}"
        return (
            "Stopped while the job was being created, so it may or may not exist. See:\n"
            f"  {self._cluster.command(f'torchrun status {self._name}')}"
        )

    def _resume_hint(self) -> str:
        return (
            "The job waits for its workspace. To continue the upload:\n"
            f"  {self._sync_command()}\n{_cancel_hint(self._cluster, self._name)}"
        )

    def _sync_command(self, *flags: str) -> str:
        """The command line that uploads the same files to the job."""
        arguments = (*self._options.sync_arguments, *flags)
        return self._cluster.command(f"torchrun sync {self._name}", *arguments)


def _follow_hint(cluster: Cluster, name: str) -> str:
    return (
        f"To follow it:\n  {cluster.command(f'torchrun logs {name} --follow')}\n"
        f"  {cluster.command(f'torchrun status {name}')}\n"
        f"To delete it:\n  {cluster.command(f'torchrun cancel {name}')}"
    )


def _cancel_hint(cluster: Cluster, name: str) -> str:
    return f"To delete the job:\n  {cluster.command(f'torchrun cancel {name}')}"


def read_workspace(cache: UploadCache, files: tree.Tree, terminal: Display) -> Workspace:
    """The directory's files with their digests, with a progress bar. Raises UsageProblem."""
    with terminal.bar("Reading", files.size) as bar:
        done = 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            bar.reached(done)

        workspace = cache.digest(files, advance)
    size = human(workspace.manifest.size)
    terminal.note(f"{files_of(workspace.manifest.files)} in {files.root.name or '/'}, {size}")
    return workspace
