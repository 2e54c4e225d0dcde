"""`state-files`: the files of a job's state directory, even after its pods are deleted."""

import sys
from typing import IO

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    output_option,
    run_command,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.terminal import Display, has_colour
from kubectl_torchrun.text import echo, log_text

_SHOW = """
cd "$0" && [ -e "$1" ] || exit 3
find "$1" -type f ! -name '.*' | sort | while read -r file; do
  echo "==> ${file#./} <=="; cat "$file"; echo
done
"""
_LIST = """
cd "$0" && [ -e "$1" ] || exit 3
find "$1" -type f ! -name '.*' | sort | while read -r file; do echo "${file#./}"; done
"""
_NOT_THERE = 3
_CHUNK = 1 << 16


@click.command("state-files", cls=Command)
@job_argument
@click.argument("path", default=".")
@output_option("name")
@cluster_options
def command(job: str, path: str, output: str, target: Target) -> None:
    """Print the files at PATH in JOB's state directory, each after a line with its name.

    Processes of the job see the directory as $TORCHRUN_STATE_DIR. It is on the workspace PVC and
    is deleted with the job. It also contains the logs of earlier attempts. -o name prints only the
    names.

    \b
    Examples:
      kubectl torchrun state-files my-project-x7k2p
      kubectl torchrun state-files my-project-x7k2p -o name
      kubectl torchrun state-files my-project-x7k2p logs/0/node-0.log
    """
    script = _LIST if output == "name" else _SHOW
    run_command(lambda terminal: _print_files(target, job, path, script, terminal))


def _print_files(target: Target, name: str, path: str, script: str, terminal: Display) -> int:
    from kubectl_torchrun.cluster.pods import list_workers
    from kubectl_torchrun.cluster.session import session
    from kubectl_torchrun.cluster.slices import JOBS
    from kubectl_torchrun.logs import copies

    if path.startswith("/") or ".." in path.split("/"):
        raise UsageProblem(
            f"Path {path} is not below the state directory. Use a relative path without '..'."
        )
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        pods = cluster.run(lambda api: list_workers(api, job))
        with copies.place(cluster, job, pods, terminal) as place:
            try:
                with place.output("sh", "-c", script, place.root, path) as content:
                    _print_content(content)
            except copies.CommandFailed as error:
                if error.code != _NOT_THERE:
                    raise
                raise UsageProblem(
                    f"Job {name} has no files at {path} in its state directory."
                ) from None
    return 0


def _print_content(content: IO[bytes]) -> None:
    """Print it as it arrives: it may be larger than the memory."""
    from kubectl_torchrun import output
    from kubectl_torchrun.cluster.kubectl import bounded_lines

    if sys.stdout.isatty():
        for line in bounded_lines(content):
            echo(log_text(line, colour=has_colour(sys.stdout)))
    else:
        while chunk := content.read(_CHUNK):
            output.put_bytes(chunk)
