"""`kept`: the files of a job's state directory, also when its pods are gone."""

import subprocess
import sys

from kubectl_torchrun import output
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.commands.logs import workers
from kubectl_torchrun.errors import ClusterProblem, UsageProblem
from kubectl_torchrun.logs import copies
from kubectl_torchrun.terminal import Terminal, has_colour
from kubectl_torchrun.text import echo, log_text

_SHOW = """
cd "$0" && [ -e "$1" ] || exit 3
find "$1" -type f ! -name '.*' | sort | while read -r file; do
  echo "==> ${file#./} <=="; cat "$file"; echo
done
"""
_NOT_THERE = 3


def show(target: Target, name: str, path: str, terminal: Terminal) -> int:
    """Print them; the exit code. Raises Problem, also where there is no such path."""
    if path.startswith("/") or ".." in path.split("/"):
        raise UsageProblem(f"{path} must be a path below the state directory.")
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))
        pods = cluster.run(lambda api: workers(api, job))
        with copies.place(cluster, job, pods, terminal) as place:
            command = place.command("sh", "-c", _SHOW, place.root, path)
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if ended.returncode == _NOT_THERE:
        raise UsageProblem(f"{name} has kept nothing at {path}.")
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ClusterProblem(f"kubectl exec says: {said[-1] if said else 'nothing'}")
    if sys.stdout.isatty():
        for line in ended.stdout.splitlines():
            echo(log_text(line, colour=has_colour(sys.stdout)))
    else:
        output.put_bytes(ended.stdout)
    return 0
