"""Real launchers of two nodes: their ranks save, fail, and resume in the same pods or a new gang."""

import json
import sys
from pathlib import Path

import pytest

from unit.runtime.launch.gang.test_gang import Gang, GangFactory, ends, make_gang

__all__ = ["make_gang"]  # the fixture

pytestmark = pytest.mark.long  # processes

TRAIN = """
import os, sys, time
from pathlib import Path
import torchrun_progress

shared, node = Path(os.environ["SHARED"]), os.environ["NODE_RANK"]
last = torchrun_progress.resume()
print("resume", last and f"{last.step} {Path(last.path).name}", flush=True)
start = last.step if last else 0
for step in range(start + 1, 4):
    folder = shared / f"step-{step}"
    folder.mkdir(exist_ok=True)
    torchrun_progress.checkpoint(step, folder)
    time.sleep(1.5)
    if node == "1" and step == 2 and os.environ["TORCHRUN_ROUND"] == "0":
        for name in os.environ.get("LOST", "").split():
            (shared / name).rmdir()
        sys.exit(3)
"""


def train(gang: Gang, **environment: str) -> "list[tuple[int, list[str]]]":
    """Exit code and lines of each node."""
    script = gang.launchers[0].directory / "train.py"
    script.write_text(TRAIN)
    command = f"{sys.executable} {script}"
    results = ends(gang.start(command, None, NNODES="2", **environment))
    return [(each.exit_code, each.out.splitlines()) for each in results]


def saved_steps(gang: Gang, node: int) -> "list[int]":
    """The checkpoints in the termination message."""
    text = (gang.launchers[node].directory / "termination-log").read_text()
    return [each["step"] for each in json.loads(text)["checkpoints"]] if text else []


def test_all_ranks_resume_from_the_newest_complete_checkpoint(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    assert train(gang) == [(0, ["resume None", "resume 2 step-2"])] * 2
    assert saved_steps(gang, 0) == [3, 2, 1], "for a controller that was away"
    assert saved_steps(gang, 1) == []


def test_a_checkpoint_that_is_gone_is_skipped_on_all_nodes(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    assert train(gang, LOST="step-2") == [(0, ["resume None", "resume 1 step-1"])] * 2


def test_the_first_round_resumes_from_the_annotation(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    folder = Path(gang.launchers[0].directory) / "step-2"
    folder.mkdir()
    time = "2026-01-01T00:00:00.000000Z"
    known = json.dumps([{"step": 2, "path": str(folder), "time": time}]).replace('"', '\\"')
    gang.annotate(start="1", checkpoints=known)
    assert train(gang) == [(0, ["resume 2 step-2"])] * 2
