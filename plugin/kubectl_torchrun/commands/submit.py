"""`submit`: upload a directory and run a command in it; flags control the rest."""

import click

from kubectl_torchrun.cli.options import (
    cluster_options,
    dry_run_option,
    output_option,
    raw_option,
    repeated_failure_option,
    run_command,
    wait_options,
)
from kubectl_torchrun.cli.request import (
    INTERRUPTED,
    RequestCommand,
    RequestFlags,
    directory_to_send,
    optional_path,
    request_of,
    request_options,
    sync_arguments,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display


@click.command("submit", cls=RequestCommand)
@request_options
@click.option("--follow/--no-follow", default=None, help="Follow the run until it ends (default).")
@raw_option
@repeated_failure_option
@wait_options("Complete")
@dry_run_option
@output_option("name", "yaml", "json")
@cluster_options
def command(
    flags: RequestFlags,
    follow: bool | None,
    raw: bool,
    stop_on_repeated_failure: bool | None,
    wait: str,
    timeout: float | None,
    dry_run: str,
    output: str,
    target: Target,
) -> None:
    """Upload the current directory and run COMMAND in it on one or more nodes.

    .git, likely secrets and files that match .gitignore or .torchrunignore are not uploaded.
    COMMAND is a shell line. Its `python ...` command runs under torchrun on every node.
    -o, --dry-run and --wait imply --no-follow.

    \b
    Examples:
      kubectl torchrun submit --gpus 8 "python train.py --epochs 10"
      kubectl torchrun submit --queue dev --nodes 2 -e LR=0.1 -- python train.py --epochs 10
      kubectl torchrun submit --dry-run "python train.py" > job.yaml
      kubectl torchrun submit -f job.yaml
      kubectl torchrun submit --wait=Running --timeout 10m -o name "python train.py"
    """
    prints = output or dry_run != "none" or wait
    if follow and prints:
        raise click.UsageError("--follow cannot be combined with -o, --dry-run or --wait.")
    following = not prints if follow is None else follow
    make_request = request_of(flags)

    def work(terminal: Display) -> int:
        from kubectl_torchrun.upload.submission import SubmitOptions, submit

        options = SubmitOptions(
            directory_to_send(flags.directory, terminal),
            overlay=optional_path(flags.overlay),
            sync_arguments=sync_arguments(flags.directory, flags.overlay),
            follow=following,
            raw=raw,
            stop_on_repeated_failure=stop_on_repeated_failure,
            dry_run=dry_run,
            form=output,
            pod_wait=flags.upload_timeout,
            wait=wait,
            timeout=timeout,
        )
        return submit(target, make_request(), options, terminal)

    run_command(work, INTERRUPTED)
