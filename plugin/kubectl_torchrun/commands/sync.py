"""`sync`: upload a directory to a job, or have the job fetch its workspace again."""

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    run_command,
    wait_options,
)
from kubectl_torchrun.cli.request import (
    directory_to_send,
    optional_path,
    overlay_option,
    sync_arguments,
    upload_timeout_option,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("sync", cls=Command)
@job_argument
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--watch", is_flag=True, help="Upload each edit (development mode).")
@overlay_option
@upload_timeout_option
@wait_options("Complete")
@cluster_options
def command(
    job: str,
    directory: str | None,
    watch: bool,
    overlay: str | None,
    upload_timeout: float,
    wait: str,
    timeout: float | None,
    target: Target,
) -> None:
    """Upload DIRECTORY to JOB, which is running or waiting for its workspace.

    DIRECTORY defaults to that of submit. An interrupted upload continues. If the directory has
    changed since `submit`, the job gets the current files. A running job keeps its pods: they get
    the changed files and restart the command together, which does not count as a restart. With
    --watch, each saved edit is uploaded, and pods whose command fails stay for the next edit
    (spec.development).

    A job whose workspace comes from git or s3 fetches it again instead.

    \b
    Examples:
      kubectl torchrun sync my-project-x7k2p
      kubectl torchrun sync my-project-x7k2p . --wait
      kubectl torchrun sync my-project-x7k2p --watch
    """
    if watch and wait:
        raise click.UsageError("--watch cannot be combined with --wait.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.wait import check
        from kubectl_torchrun.upload.submission import SubmitOptions
        from kubectl_torchrun.upload.sync import sync

        options = SubmitOptions(
            directory_to_send(directory, terminal),
            overlay=optional_path(overlay),
            sync_arguments=sync_arguments(directory, overlay),
            pod_wait=upload_timeout,
            wait=wait and check(wait),
            timeout=timeout,
        )
        return sync(target, job, options, terminal, watch=watch)

    run_command(work, "; nothing was uploaded")
