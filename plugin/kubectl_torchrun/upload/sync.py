"""A directory for a job that waits for it or runs; or a new fetch, for a job that fetches."""

from kubectl_torchrun.cluster.kubectl import Target, proxy, resolve
from kubectl_torchrun.cluster.session import Cluster
from kubectl_torchrun.cluster.slices import JOBS, Job
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.terminal import Terminal
from kubectl_torchrun.upload import pack, refetch, tree, upload_token
from kubectl_torchrun.upload.cache import UploadCache
from kubectl_torchrun.upload.reload import Reload
from kubectl_torchrun.upload.submission import (
    Submission,
    SubmitOptions,
    note_left_out,
    read_workspace,
)
from torchrun_api import names

_FETCHED = ("git", "s3")  # sources that a job fetches by itself
_FETCH_SECONDS = 600.0


def sync(
    target: Target, name: str, options: SubmitOptions, terminal: Terminal, *, watch: bool
) -> int:
    """Upload the directory to a job that waits for it or runs; the exit code. Raises Problem.

    A job that fetches its workspace by itself is asked to fetch it again. watch: send each edit.
    """
    namespace = resolve(target)
    with proxy(target) as socket:
        cluster = Cluster(target, namespace.name, socket)
        job = cluster.run(lambda api: api.get(JOBS, name))
        _check_source(job, cluster)
        if _source(job) in _FETCHED:
            return _fetch_again(cluster, job, terminal)
        cache = UploadCache(namespace, options.directory)
        token = upload_token.upload_token(namespace, name)
        if job.workspace_ready or watch:
            reload = Reload(
                cluster,
                name,
                options.directory,
                cache,
                terminal,
                options.pod_wait,
                token,
                options.overlay,
            )
            return reload.watch() if watch else reload.once()
        files = tree.scan(options.directory, options.overlay)
        pack.check(files)
        note_left_out(files, terminal)
        workspace = read_workspace(cache, files, terminal)
        sha256 = workspace.manifest.sha256
        expected = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
        if expected not in ("", sha256):
            terminal.note(
                f"{name} waits for another content of this directory; it shall take this one now."
            )
        if expected != sha256:
            annotations = {
                names.WORKSPACE_SHA256: sha256,
                names.UPLOAD_TOKEN_SHA256: upload_token.token_sha256(token),
            }
            cluster.run(lambda api: api.annotate(JOBS, name, annotations))
        submission = Submission(cluster, name, workspace, cache, terminal, options, token)
        return submission.run()


def _fetch_again(cluster: Cluster, job: Job, terminal: Terminal) -> int:
    """Have a job fetch its workspace again from git or s3; the exit code."""
    name = job.metadata.name
    if job.status.phase == "Running":
        return cluster.run(lambda api: refetch.refetch(api, job, terminal, _FETCH_SECONDS))
    cluster.run(lambda api: refetch.request(api, name))
    when = "with its next workers" if job.workspace_ready else "now"
    terminal.note(f"{name} fetches its workspace from {_source(job)} again, {when}.")
    return 0


def _source(job: Job) -> str:
    """Where the job's workspace comes from; `none` where it has none."""
    workspace = job.spec.volumes.workspace
    return workspace.source if workspace and workspace.enabled else "none"


def _check_source(job: Job, cluster: Cluster) -> None:
    """Raises UsageProblem for a job that is over or takes neither an upload nor a new fetch."""
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
