"""Upload a directory to an existing job, or request a new fetch of its workspace."""

from kubectl_torchrun.cluster import wait
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import Cluster, session
from kubectl_torchrun.cluster.slices import JOBS, JobSlice
from kubectl_torchrun.errors import DETACHED, SUCCEEDED, UsageProblem
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload import consent, pack, refetch, tree, upload_token
from kubectl_torchrun.upload.cache import UploadCache
from kubectl_torchrun.upload.reload import DirectoryReload
from kubectl_torchrun.upload.submission import (
    Submission,
    SubmitOptions,
    read_workspace,
)
from torchrun_api import names
from torchrun_api.kinds.workspace import FETCHED_SOURCES

_FETCH_SECONDS = 600.0


def sync(
    target: Target, name: str, options: SubmitOptions, terminal: Display, *, watch: bool
) -> int:
    """Upload the directory to a job that waits for it or runs; the exit code. Raises Problem.

    A job with a git or s3 workspace fetches it again instead. watch: upload each edit.
    """
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        _check_source(job, cluster)
        if _source(job) in FETCHED_SOURCES:
            return _fetch_again(cluster, job, terminal) or _wait(cluster, name, options, terminal)
        cache = UploadCache(cluster.where, options.directory)
        token = upload_token.upload_token(cluster.where, name)
        if job.workspace_ready or watch:
            reload = DirectoryReload(
                cluster,
                name,
                options.directory,
                cache,
                terminal,
                options.pod_wait,
                token,
                options.overlay,
                options.sync_arguments,
            )
            if watch:
                return reload.watch()
            return reload.once() or _wait(cluster, name, options, terminal)
        files = consent.scan(options.directory, options.overlay)
        pack.check(files)
        tree.note_skipped(files, terminal)
        workspace = read_workspace(cache, files, terminal)
        sha256 = workspace.manifest.sha256
        expected = job.metadata.annotations.get(names.WORKSPACE_SHA256, "")
        if expected not in ("", sha256):
            terminal.note(
                f"Job {name} expects other content. Uploading the current content instead."
            )
        if expected != sha256:
            annotations = {
                names.WORKSPACE_SHA256: sha256,
                names.UPLOAD_TOKEN_SHA256: upload_token.token_sha256(token),
            }
            cluster.run(lambda api: api.annotate(JOBS, name, annotations))
        submission = Submission(cluster, name, workspace, cache, terminal, options, token)
        return submission.run()


def _fetch_again(cluster: Cluster, job: JobSlice, terminal: Display) -> int:
    """Request a new fetch of the workspace from git or s3; the exit code."""
    name = job.metadata.name
    if job.status.phase == "Running":
        why = cluster.command(f"torchrun why {name}")
        return cluster.run(lambda api: refetch.refetch(api, job, terminal, _FETCH_SECONDS, why))
    cluster.run(lambda api: refetch.request(api, name))
    when = "for its next pods" if job.workspace_ready else "now"
    terminal.note(f"Job {name} fetches its workspace from {_source(job)} again {when}.")
    return 0


def _wait(cluster: Cluster, name: str, options: SubmitOptions, terminal: Display) -> int:
    """Wait for the condition of --wait, if there is one; the exit code."""
    if not options.wait:
        return SUCCEEDED
    try:
        return cluster.run(
            lambda api: wait.wait(api, name, terminal, options.wait, options.timeout)
        )
    except KeyboardInterrupt:
        terminal.interrupted()
        terminal.note(f"Job {name} continues. {cluster.command(f'torchrun status {name}')}")
        return DETACHED


def _source(job: JobSlice) -> str:
    """The source of the job's workspace; `none` without a workspace."""
    workspace = job.spec.volumes.workspace
    return workspace.source if workspace and workspace.enabled else "none"


def _check_source(job: JobSlice, cluster: Cluster) -> None:
    """Raises UsageProblem for a job that has ended, or whose source allows no upload or fetch."""
    name, source = job.metadata.name, _source(job)
    claim = job.spec.volumes.workspace.claim_name if job.spec.volumes.workspace else ""
    if job.has_ended:
        raise UsageProblem(
            f"Cannot sync job {name}: it is already {job.status.phase}. Submit a new job:"
            f" {cluster.command('torchrun submit')}"
        )
    if source == "none":
        raise UsageProblem(
            f"Job {name} has no workspace (spec.volumes.workspace), because its code is in its"
            f" image. Submit a new job: {cluster.command('torchrun submit')}"
        )
    if source == "existing":
        raise UsageProblem(
            f"Job {name} accepts no upload: its workspace is PVC {claim} (source existing)."
            " Change the files in the PVC."
        )
