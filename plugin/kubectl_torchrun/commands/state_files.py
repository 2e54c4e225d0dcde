"""`state-files`: the files of a job's state directory, even after its pods are deleted."""

import subprocess
import sys

import click

from kubectl_torchrun.cli.options import (
    Command,
    cluster_options,
    job_argument,
    output_option,
    run_command,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.errors import ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Terminal, has_colour
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


def _print_files(target: Target, name: str, path: str, script: str, terminal: Terminal) -> int:
    from kubectl_torchrun import output
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
            command = place.command("sh", "-c", script, place.root, path)
            result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if result.returncode == _NOT_THERE:
        raise UsageProblem(f"Job {name} has no files at {path} in its state directory.")
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        raise ClusterProblem(f"kubectl exec failed: {lines[-1] if lines else 'no error message'}")
    if sys.stdout.isatty():
        for line in result.stdout.splitlines():
            echo(log_text(line, colour=has_colour(sys.stdout)))
    else:
        output.put_bytes(result.stdout)
    return 0
