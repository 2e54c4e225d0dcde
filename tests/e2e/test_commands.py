"""The table of commands of runs on one machine, on real pods: the same must come out."""

import subprocess
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space
from local.test_commands import CASES, Case, assert_comes_out, write_files
from torchrun_api.json import JsonObject

# What only a run on one machine says.
LOCAL = ("Not used on this machine: spec.priority.", "Attempt 0 ended: Pod project")
SECONDS = 300
STORAGE: JsonObject = {
    "workspace": {"enabled": True, "size": "32Mi"},
    "checkpoints": {"enabled": True, "size": "32Mi"},
}
# Rows of Pythons without torch, and those with flags of a run on one machine.
CASES_OF_PODS = [c for c in CASES if not c.no_torch and "--gpus-per-node" not in c.options]

pytestmark = pytest.mark.long


@pytest.mark.parametrize("case", CASES_OF_PODS, ids=lambda case: case.name)
def test_what_comes_out_of_pods(case: Case, space: Space, tmp_path: Path) -> None:
    resources = {"cpus": "50m", "memory": "600Mi"}
    space.apply(queue("h100", space.cluster.trainer, nodeResources=resources, storage=STORAGE))
    directory = tmp_path / "project"
    write_files(case, directory)
    (directory / "README").touch()  # an empty directory is refused
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
    assert_comes_out(case, ended, LOCAL)
