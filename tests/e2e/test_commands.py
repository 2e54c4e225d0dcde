"""The table of commands of runs on one machine, on real pods: the same must come out."""

import subprocess
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from local.test_commands import CASES, Case, write_files

# What only a run on one machine says.
LOCAL = ("Not used on this machine: spec.priority.", "Attempt 0 ended: Pod project")
SECONDS = 300

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.no_torch], ids=lambda case: case.name
)
def test_what_comes_out_of_pods(case: Case, space: Space, tmp_path: Path) -> None:
    resources = {"cpus": "50m", "memory": "600Mi"}
    space.apply(queue("h100", space.cluster.trainer, nodeResources=resources))
    directory = tmp_path / "project"
    write_files(case, directory)
    command = ["--queue", "h100", case.command] if case.command else []  # a file names its queue
    ended = subprocess.run(
        ["kubectl", "torchrun", "run", "-n", space.name, *case.options, *command],
        cwd=directory,
        env=space.cluster.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    shown = f"{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == case.code, shown
    for text in case.out:
        assert text in ended.stdout, shown
    for text in case.err:
        assert text in LOCAL or text in ended.stderr, shown
    for text in ("Traceback (most recent call last):", *case.absent):
        assert text not in ended.stderr, shown
