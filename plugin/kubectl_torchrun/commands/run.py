"""`run`: upload a directory, run a command in it and follow it, as on this machine."""

import click

from kubectl_torchrun.cli.options import (
    cluster_options,
    output_option,
    raw_option,
    repeated_failure_option,
    run_command,
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
from kubectl_torchrun.terminal import Terminal


@click.command("run", cls=RequestCommand)
@request_options
@click.option("--detach", "-d", is_flag=True, help="Return after the upload.")
@raw_option
@repeated_failure_option
@output_option("name", "yaml", "json")
@cluster_options
def command(
    flags: RequestFlags,
    detach: bool,
    raw: bool,
    stop_on_repeated_failure: bool | None,
    output: str,
    target: Target,
) -> None:
    """Upload the current directory, run COMMAND in it and follow its logs; exit with its result.

    Ctrl-C detaches and the run continues. A second Ctrl-C within 5 seconds deletes the job. With
    --dev, sync --watch in another terminal uploads each edit. -o needs --detach.

    \b
    Examples:
      kubectl torchrun run --gpus 8 "python train.py --epochs 10"
      kubectl torchrun run --nodes 2 --detach "python train.py"
      kubectl torchrun run --dev --name try "python train.py"
      kubectl torchrun sync try --watch
    """
    if output and not detach:
        raise click.UsageError("-o prints the job instead of its logs. Add --detach.")
    make_request = request_of(flags)

    def work(terminal: Terminal) -> int:
        from kubectl_torchrun.upload.submission import SubmitOptions, submit

        options = SubmitOptions(
            directory_to_send(flags.directory, terminal),
            overlay=optional_path(flags.overlay),
            sync_arguments=sync_arguments(flags.directory, flags.overlay),
            follow=not detach,
            raw=raw,
            stop_on_repeated_failure=stop_on_repeated_failure,
            form=output,
            pod_wait=flags.upload_timeout,
            deletes=True,
        )
        return submit(target, make_request(), options, terminal)

    run_command(work, INTERRUPTED)
