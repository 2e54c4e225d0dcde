"""Two launchers of one gang, each with two ranks: all ranks stop at the same call of stopping()."""

import json
import signal

import pytest

from unit.runtime.launch.gang.test_gang import Gang, GangFactory, ends, make_gang
from unit.runtime.launching import Launched, Result

pytestmark = pytest.mark.long  # processes

__all__ = ["make_gang"]

# Starts two ranks, as torchrun does, and ends as the first of them that fails.
AGENT = """
import os, subprocess, sys
node = int(os.environ["NODE_RANK"])
sizes = dict(LOCAL_WORLD_SIZE="2", WORLD_SIZE="4")
ranks = [
    subprocess.Popen(
        [sys.executable, "train.py"],
        env={**os.environ, **sizes, "LOCAL_RANK": str(i), "RANK": str(2 * node + i)},
    )
    for i in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
# A step of 20 ms, which ends on all ranks together: they wait for the files of the others.
TRAIN = """
import os, pathlib, signal, sys, time
import torchrun_progress
rank, shared = int(os.environ["RANK"]), pathlib.Path(os.environ["SHARED"])
def log(text):
    os.write(1, f"{text}\\n".encode())
def together(step):
    (shared / f"at.{rank}").write_text(str(step))
    for other in range(4):
        while True:
            try:
                if int((shared / f"at.{other}").read_text() or 0) >= step:
                    break
            except (OSError, ValueError):
                pass
            time.sleep(0.001)
signal.signal(signal.SIGTERM, lambda *_: (log(f"rank {rank} got SIGTERM"), sys.exit(9)))
calls = 0
for step in range(1, int(os.environ.get("STEPS", "1000000"))):
    time.sleep(float(os.environ.get("STEP", "0.02")))
    together(step)
    while rank == 3 and (shared / "hang").exists():
        time.sleep(0.01)
    if os.environ.get("SILENT") == str(rank):
        log(f"rank {rank} step {step}") if step == 5 else None
        continue
    left = torchrun_progress.stopping()
    calls += 1
    if torchrun_progress.save_requested():
        log(f"rank {rank} saves at {calls}")
    if left is not None:
        log(f"rank {rank} stops at {calls} of {step} with {left:.0f} s")
        time.sleep(float(os.environ.get("SAVE", "0")))
        torchrun_progress.checkpoint(step, shared)
        log(f"rank {rank} has saved")
        break
    if step == 5:
        log(f"rank {rank} step 5")
else:
    log(f"rank {rank} has finished")
"""


def start(gang: Gang, **more: str) -> list[Launched]:
    """Start the gang, and wait until each rank has made five calls."""
    gang.annotate(start="1")
    for launcher in gang.launchers:
        (launcher.directory / "agent.py").write_text(AGENT)
        (launcher.directory / "train.py").write_text(TRAIN)
    environment = {"TORCHRUN_GRACE_SECONDS": "25", **more}
    running = gang.start(f"{gang.launchers[0].python} agent.py", **environment)
    for launched in running:
        for _ in range(2):
            assert launched.line().endswith("step 5")
    return running


def stops_of(results: list[Result]) -> list[str]:
    """The calls at which the ranks have stopped."""
    lines = [line for result in results for line in result.out.splitlines()]
    return [line.split()[4] for line in lines if " stops at " in line]


@pytest.mark.parametrize("nodes", [[0], [1], [0, 1]], ids=["leader", "member", "all"])
def test_all_ranks_stop_at_the_same_call_whichever_pod_is_asked(
    make_gang: GangFactory, nodes: list[int]
) -> None:
    running = start(make_gang(2))
    for node in nodes:
        running[node].stop()
    results = ends(running)
    calls = stops_of(results)
    assert len(calls) == 4
    assert len(set(calls)) == 1
    for node, result in enumerate(results):
        assert "SIGTERM" not in result.out
        assert result.out.count("has saved") == 2
        assert result.exit_code == 143
        asked = node in nodes
        assert result.message["reason"] == ("Stopped" if asked else "PeerStopped"), result.err
        assert f"stopped at call {calls[0]}, as they had agreed" in str(result.message["message"])
    kept = results[0].message["checkpoints"]
    assert isinstance(kept, list)
    assert str(kept[0]["step"]) == calls[0], "the next gang resumes where this one has stopped"


def test_a_rank_that_does_not_take_part_gets_the_signal_at_once(make_gang: GangFactory) -> None:
    running = start(make_gang(2), SILENT="3")
    running[1].stop()
    result = running[1].end()
    assert "holding back" not in result.err
    assert "rank 2 got SIGTERM" in result.out
    assert "rank 3 got SIGTERM" in result.out
    assert result.message["reason"] == "Stopped"
    running[0].stop()
    refused = running[0].end()
    assert "rank 0 got SIGTERM" in refused.out
    assert stops_of([result, refused]) == []


def test_a_rank_of_another_node_that_does_not_take_part_refuses_the_stop(
    make_gang: GangFactory,
) -> None:
    running = start(make_gang(2), SILENT="3")
    running[0].stop()
    result = running[0].end()
    assert "the ranks do not stop together: node 1: not every rank has called" in result.err
    assert "rank 0 got SIGTERM" in result.out
    running[1].stop()
    running[1].end()


def test_a_save_may_take_the_rest_of_the_grace_period_and_no_more(make_gang: GangFactory) -> None:
    running = start(make_gang(2), SAVE="1000", TORCHRUN_GRACE_SECONDS="6")
    for launched in running:
        launched.stop()
    results = ends(running)
    assert len(stops_of(results)) == 4
    assert all("the grace period is over" in result.err for result in results)
    assert [result.message["reason"] for result in results] == ["Stopped"] * 2
    assert "has saved" not in results[0].out


def test_a_step_that_is_too_long_for_the_grace_period_gets_the_signal_at_once(
    make_gang: GangFactory,
) -> None:
    running = start(make_gang(2), STEP="2", TORCHRUN_GRACE_SECONDS="2")
    running[0].stop()
    result = running[0].end()
    assert "for their present step" in result.err
    assert "rank 0 got SIGTERM" in result.out
    running[1].stop()
    running[1].end()


def test_a_training_that_finishes_before_the_call_has_succeeded(make_gang: GangFactory) -> None:
    running = start(make_gang(2), STEPS="7", STEP="0.5")
    running[0].stop()
    results = ends(running)
    assert [result.out.count("has finished") for result in results] == [2, 2] or stops_of(results)
    if not stops_of(results):
        assert [result.exit_code for result in results] == [0, 0]


def ask_for_save(gang: Gang, seconds: float = 60.0) -> list[dict[str, object]]:
    """What the program prints that asks the ranks of the run in this time."""
    import subprocess

    from unit.runtime.launching import FOLDER

    asking = (
        "import sys, json; sys.path.insert(0, sys.argv[1]);"
        "from torchrun_runtime.launch.save import ask;"
        "print(json.dumps(list(ask(float(sys.argv[2]), 'run'))))"
    )
    ended = subprocess.run(
        [gang.launchers[0].python, "-c", asking, str(FOLDER.parents[1]), str(seconds)],
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, object]] = json.loads(ended.stdout)
    return answers


def test_all_ranks_save_at_the_same_call_and_go_on(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    running = start(gang, TORCHRUN_JOB_NAME="run")
    answers = [ask_for_save(gang) for _ in range(2)]
    for launched in running:
        launched.stop(signal.SIGTERM)
    results = ends(running)
    assert len(stops_of(results)) == 4
    assert [answer[-1]["state"] for answer in answers] == ["done"] * 2
    for answer in answers:
        saved = [r.out.count(f"saves at {answer[-1]['call']}\n") for r in results]
        assert saved == [2, 2]


def test_a_request_ends_in_time_while_a_rank_hangs(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    running = start(gang, TORCHRUN_JOB_NAME="run")
    hang = gang.launchers[0].directory / "hang"
    hang.touch()
    answers = ask_for_save(gang, 3.0)
    states = [answer["state"] for answer in answers]
    assert (states.count("committed") >= 2, states[-1]) == (True, "late"), states
    hang.unlink()
    for launched in running:
        assert launched.line().endswith(f"saves at {answers[-2]['call']}")
        launched.stop()
    ends(running)
