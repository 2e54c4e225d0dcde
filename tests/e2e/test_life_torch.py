"""The lifecycle with real torch: training continues from checkpoints, without repeated steps."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest
import yaml

from e2e.cluster import ROOT
from e2e.history import History, assert_gangs_never_overlap
from e2e.manifests import job, queue
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

GPT = ROOT / "examples" / "gpt"
STEP = re.compile(r"^\[rank 0\] step (\d+)/", re.MULTILINE)
RESUMED = re.compile(r"^\[rank 0\] resumed after step (\d+)/", re.MULTILINE)
LOSS = re.compile(r"^\[rank 0\] finished \d+ steps, final loss (\S+)", re.MULTILINE)
# Checkpoints only on SIGTERM and at the end.
OPTIONS = ("--log-every", "1", "--checkpoint-every", "1000000", "--sample", "0")
RESOURCES = {"cpus": "250m", "memory": "1500Mi"}
RAISES = """
import os, time
import torch
if os.environ["RANK"] == "1":
    print("about to raise", flush=True)
    raise ValueError("loss is nan after step 7")
time.sleep(300)
"""
EXITS = """
import os, time
import torch
if os.environ["RANK"] == "1" and os.environ["TORCHRUN_ATTEMPT"] == "0":
    os._exit(9)
time.sleep(0 if int(os.environ["TORCHRUN_ATTEMPT"]) else 300)
"""


@pytest.fixture
def torch_space(space: Space) -> Space:
    """A namespace with the queue `torch` and the GPT example in a ConfigMap."""
    own = yaml.safe_load((GPT / "queue.yaml").read_text())["spec"]
    storage = {"workspace": {"enabled": False}, "checkpoints": own["storage"]["checkpoints"]}
    space.apply(queue("torch", space.cluster.trainer, nodeResources=RESOURCES, storage=storage))
    files = [f"--from-file={GPT / name}" for name in ("train.py", "model.py", "sonnets.txt")]
    space.kubectl("create", "configmap", "gpt", *files)
    return space


def gpt(name: str, steps: int, nodes: int, **spec: object) -> JsonObject:
    """A job with the GPT example and its own checkpoints."""
    return job(
        *(name, "torch", ["python3", "/code/train.py", "--steps", str(steps), *OPTIONS], nodes),
        launcher="torchrun",
        volumes={
            "additionalVolumes": [{"name": "code", "configMap": {"name": "gpt"}}],
            "additionalMounts": [{"name": "code", "mountPath": "/code"}],
        },
        **spec,
    )


class Log:
    """The log of one pod, read until its end."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._grown = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._grown:
                self._lines.append(line)
                self._grown.notify_all()

    @property
    def text(self) -> str:
        """The log so far."""
        with self._grown:
            return "".join(self._lines)

    def has(self, steps: int, seconds: float = 60) -> None:
        """Wait until rank 0 has printed this many steps."""
        with self._grown:
            enough = self._grown.wait_for(lambda: len(self.steps) >= steps, seconds)
        assert enough, f"no {steps} steps within {seconds:.0f} s:\n{self.text}"

    @property
    def steps(self) -> list[int]:
        """The steps that rank 0 has printed, in order."""
        return [int(step) for step in STEP.findall(self.text)]

    def whole(self, seconds: float = 60) -> "Log":
        """Wait until the pod has ended, and return the log."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the log has not ended"
        print(self.text)
        return self


@contextmanager
def master_log(space: Space, child: str) -> Iterator[Log]:
    """The log of the pod with index 0 of a child Job, after its start."""
    listed = space.api.get(PODS.path(space.name), params={"labelSelector": f"job-name={child}"})
    (pod,) = (
        pod["metadata"]["name"]
        for pod in listed.json()["items"]
        if pod["metadata"]["name"].startswith(f"{child}-0-")
    )
    with subprocess.Popen(
        ["kubectl", "-n", space.name, "logs", "-f", pod, "-c", "trainer"],
        env=space.cluster.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Log(process)
        finally:
            process.terminate()


def gang_runs(jobs: History, attempt: int, nodes: int) -> None:
    """Wait until all workers of the attempt run."""

    def holds(state: JsonObject) -> bool | None:
        status = state.get("status", {})
        this = status.get("attempt", 0) == attempt and status.get("numNodes") == nodes
        return (this and status.get("phase") == "Running") or None

    jobs.until(holds)


def gang_trains(
    space: Space, jobs: History, attempt: int, nodes: int, then: Callable[[], None]
) -> Log:
    """Wait until the gang has done a few steps, call the action, and return the complete log."""
    gang_runs(jobs, attempt, nodes)
    with master_log(space, f"train-r{attempt}" if attempt else "train") as log:
        log.has(20)
        then()
        return log.whole(120)


@pytest.mark.long
def test_an_exception_is_in_the_status_within_five_seconds(torch_space: Space):
    space = torch_space
    command = ["python3", "-c", RAISES]
    with space.history(TORCHRUN_JOBS) as jobs:
        once = {"maxRestarts": 0}
        space.apply(job("dies", "torch", command, 2, launcher="torchrun", reliability=once))
        failure = jobs.until(lambda state: state.get("status", {}).get("lastFailure"))
        seen = time.time()
    assert failure["rank"] == 1
    assert "ValueError: loss is nan after step 7" in failure["message"]
    selector = "job-name=dies,batch.kubernetes.io/job-completion-index=1"
    log = space.kubectl("logs", "--timestamps", "-l", selector, "-c", "trainer", "--tail=-1")
    raised = next(line.split()[0] for line in log.splitlines() if "about to raise" in line)
    seconds = seen - datetime.fromisoformat(raised).timestamp()
    print(f"reported {seconds:.2f} s after the raise")
    assert seconds <= 5
    assert space.wait_phase("dies", "Failed")["reason"] == "Exception"


@pytest.mark.long
def test_an_exited_rank_restarts_the_gang_and_counts(torch_space: Space):
    space = torch_space
    with space.history(PODS) as pods:
        command, gang = ["python3", "-c", EXITS], {"restartScope": "Gang"}
        space.apply(job("exits", "torch", command, 2, launcher="torchrun", reliability=gang))
        status = space.wait_phase("exits", "Succeeded")
        assert_gangs_never_overlap(pods)
    assert (status["attempt"], status["restarts"], status.get("disruptions", 0)) == (1, 1, 0)
    assert (status["lastFailure"]["rank"], status["lastFailure"]["exitCode"]) == (1, 9)
    assert space.end_state() == [
        "jobs/exits",
        "jobs/exits-r1",
        "persistentvolumeclaims/exits-checkpoints Bound",
        "pods/exits-1-* Failed",
        "pods/exits-r1-0-* Succeeded",
        "pods/exits-r1-1-* Succeeded",
        "services/exits",
        "torchrunjobs/exits Succeeded",
    ]


def ended(child: str, nodes: int) -> list[str]:
    """The objects after a job `train` whose earlier gangs were deleted."""
    return [
        f"jobs/{child}",
        "persistentvolumeclaims/train-checkpoints Bound",
        *(f"pods/{child}-{index}-* Succeeded" for index in range(nodes)),
        "services/train",
        "torchrunjobs/train Succeeded",
    ]


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_a_suspended_run_ends_with_the_same_loss(torch_space: Space):
    space, steps = torch_space, 100

    def suspend(value: str) -> None:
        body = f'{{"spec":{{"suspend":{value}}}}}'
        space.kubectl("patch", "tj", "train", "--type=merge", "-p", body)

    with space.histories(TORCHRUN_JOBS, PODS) as (jobs, pods):
        space.apply(gpt("train", steps, 2))
        first = gang_trains(space, jobs, 0, 2, lambda: suspend("true"))
        space.wait_phase("train", "Suspended")
        space.kubectl("wait", "pods,jobs", "--all", "--for=delete", "--timeout=180s")
        suspend("false")
        second = gang_trains(space, jobs, 1, 2, lambda: None)
        status = space.wait_phase("train", "Succeeded")
        assert_gangs_never_overlap(pods)
    left = first.steps[-1]
    assert 20 <= left < steps, "it was suspended during the training"
    assert f"saved /checkpoints/step-{left:08d}.pt" in first.text, "SIGTERM wrote a checkpoint"
    assert RESUMED.findall(second.text) == [str(left)]
    assert first.steps + second.steps == list(range(1, steps + 1))
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0)
    assert space.end_state() == ended("train-r1", 2)

    space.apply(gpt("whole", steps, 2))
    space.wait_phase("whole", "Running")
    with master_log(space, "whole") as log:
        undisturbed = log.whole(120)
    assert LOSS.findall(second.text) == LOSS.findall(undisturbed.text) != []


@pytest.mark.long
@pytest.mark.timeout(900, func_only=True)
def test_scaling_neither_skips_nor_repeats_steps(torch_space: Space):
    space, steps = torch_space, 300

    def scale(nodes: int) -> None:
        space.kubectl("scale", "torchrunjob/train", f"--replicas={nodes}")

    with space.histories(TORCHRUN_JOBS, PODS) as (jobs, pods):
        space.apply(gpt("train", steps, 2, elastic={"minNodes": 1, "maxNodes": 3}))
        logs = [
            gang_trains(space, jobs, 0, 2, lambda: scale(3)),
            gang_trains(space, jobs, 1, 3, lambda: scale(2)),
            gang_trains(space, jobs, 2, 2, lambda: None),
        ]
        status = space.wait_phase("train", "Succeeded")
        assert_gangs_never_overlap(pods)
    done = [step for log in logs for step in log.steps]
    assert done == list(range(1, steps + 1))
    assert [len(log.steps) >= 20 for log in logs] == [True] * 3
    assert (status["attempt"], status.get("restarts", 0), status["numNodes"]) == (2, 0, 2)
    assert space.end_state() == ended("train-r2", 2)
