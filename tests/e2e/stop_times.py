"""Lost steps and seconds of planned stops, with real pods and real torch.

    RUNS=30 make stop-times     stops a job by each source in turns, and prints a table

The ranks save every EVERY steps, and at a stop. A start of the ranks ends with 3 if the checkpoint that
it gets is not complete on disk. It records how many steps the ranks before it had done.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from bodies import Body
from e2e.manifests import job, queue
from e2e.space import Space, until
from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_cluster import LocalCluster

JOB = "train"
QUEUE = "torch"
EVERY = 50
_RESOURCES: JsonObject = {"cpus": "250m", "memory": "1500Mi"}
_VOLUME: JsonObject = {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}
_MOUNT: JsonObject = {"name": "shared", "mountPath": "/shared"}
_LEAVING = "cloud.google.com/impending-node-termination"

_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist, torchrun_progress

every, agree = int(sys.argv[1]), sys.argv[2] == "stopping"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
home = Path("/shared", os.environ["TORCHRUN_JOB_NAME"])
home.mkdir(exist_ok=True)
start = os.environ["TORCHRUN_ATTEMPT"] + "-" + os.environ["TORCHRUN_ROUND"]

def save(step):
    folder = home / f"step-{step}-{start}"
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}").write_text(str(world))
    time.sleep(0.2)  # as a real one, long enough to be hit by a stop
    dist.barrier()
    torchrun_progress.checkpoint(step, folder)

last = torchrun_progress.resume()
done = [int(file.read_bytes() or 0) for file in home.glob("done-*")]
dist.barrier()
if last:
    shards = [file.read_text() for file in Path(last.path).iterdir()]
    if not shards or len(shards) != int(shards[0]):
        print("the checkpoint is not complete:", last, shards, flush=True)
        sys.exit(3)
if rank == 0:
    for file in home.glob("done-*"):
        file.unlink()
    with open(home / "starts", "a") as file:
        print(start, max(done, default=0), last.step if last else 0, file=file, flush=True)
dist.barrier()
mine = os.open(home / f"done-{rank}", os.O_RDWR | os.O_CREAT)
step = last.step if last else 0
while True:
    step += 1
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
    os.pwrite(mine, b"%9d" % step, 0)
    torchrun_progress.report(step=step)
    left = torchrun_progress.stopping() if agree else None
    if left is not None or step % every == 0:
        save(step)
    if left is not None:
        break
dist.destroy_process_group()
"""


class Sample(NamedTuple):
    """One stop: steps that had been done and were lost, and seconds from the request to the last pod."""

    source: str
    lost: int
    seconds: float | None


Request = Callable[[Space, str], AbstractContextManager[None]]
"""Asks for the stop of a job. At the end of the block the job may go on."""


class Start(NamedTuple):
    """One start of the ranks: steps that the ranks before it had done, and the step it goes on from."""

    name: str
    done: int
    resumed: int


def prepare(space: Space) -> None:
    """Create the queue, the shared storage, and the pod that reads it."""
    workspace: JsonObject = {"workspace": {"enabled": False}, "checkpoints": {"enabled": False}}
    settings: JsonObject = {"nodeResources": _RESOURCES, "storage": workspace, "quota": {"jobs": 1}}
    claim: JsonObject = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    container: JsonObject = {
        "name": "reader",
        "image": space.cluster.controller,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", "import time; time.sleep(10**6)"],
        "volumeMounts": [_MOUNT],
    }
    reader: JsonObject = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "containers": [container],
            "volumes": [_VOLUME],
            "terminationGracePeriodSeconds": 0,
        },
    }
    space.apply(queue(QUEUE, space.cluster.trainer, **settings), claim, reader)
    space.wait("pod/reader", "condition=Ready")


def start_job(space: Space, name: str, how: str, **spec: JsonValue) -> None:
    """Start two nodes that train for ever. how: "stopping", or "signal" without planned stops."""
    volumes: JsonObject = {
        "additionalVolumes": [_VOLUME],
        "additionalMounts": [_MOUNT],
    }
    settings: JsonObject = {
        "launcher": "torchrun",
        "volumes": volumes,
        "elastic": {"minNodes": 1, "maxNodes": 2},
        **spec,
    }
    command: list[JsonValue] = ["python3", "-c", _SCRIPT, str(EVERY), how]
    space.apply(job(name, QUEUE, command, 2, **settings))


def read_starts(space: Space, name: str) -> list[Start]:
    """All starts of the ranks of a job so far."""
    lines = _read(space, f"{name}/starts").splitlines()
    words = (line.split() for line in lines)
    return [Start(start, int(done), int(resumed)) for start, done, resumed in words]


def read_step(space: Space, name: str) -> int:
    """The newest step that rank 0 has done."""
    return int(_read(space, f"{name}/done-0") or 0)


def _read(space: Space, path: str) -> str:
    line = f"cat /shared/{path} 2>/dev/null || true"
    return space.kubectl("exec", "reader", "--", "sh", "-c", line).strip()


def measure(space: Space, source: str, request: Request, name: str = JOB) -> Sample:
    """Stop a job that trains at a random step, let it go on, and read what it has lost."""
    wait_steps(space, name, random.randrange(10, 10 + EVERY))
    starts = read_starts(space, name)
    gang = live_pods(space, name)
    asked = time.monotonic()
    with request(space, name):
        until(lambda: not gang & live_pods(space, name), f"{source} ends the gang")
        seconds = time.monotonic() - asked
    until(lambda: len(read_starts(space, name)) > len(starts), "the ranks start again")
    start = read_starts(space, name)[len(starts)]
    return Sample(source, start.done - start.resumed, seconds)


def measure_moment(space: Space, source: str, seconds: float, act: Callable[[], object]) -> Sample:
    """Stop a job some seconds after its pods have started, and `act` at once; it trains again after it."""
    with suspend(space, JOB):
        until(lambda: not live_pods(space, JOB), "the gang ends")
    until(lambda: len(live_pods(space, JOB, "Running")) == 2, "the next gang runs")
    time.sleep(seconds)
    asked = time.monotonic()
    with suspend(space, JOB):
        act()
        until(lambda: not live_pods(space, JOB), f"{source} ends the gang")
        ended = time.monotonic() - asked
        starts = read_starts(space, JOB)
    until(lambda: len(read_starts(space, JOB)) > len(starts), "the ranks start again")
    start = read_starts(space, JOB)[-1]
    return Sample(source, max(start.done - start.resumed, 0), ended)


def measure_deadline(space: Space, name: str) -> Sample:
    """Let a job reach its deadline, after it has trained. The time of the request is not known."""
    seconds = random.randrange(30, 40)
    start_job(space, name, "stopping", reliability={"activeDeadlineSeconds": seconds})
    space.wait_phase(name, "TimedOut")
    until(lambda: not live_pods(space, name), "the deadline ends the gang")
    status = space.status(name)
    step = read_step(space, name)
    assert step, "the ranks have not trained before the deadline"
    lost = step - status.get("lastCheckpoint", {}).get("step", 0)
    space.kubectl("delete", "torchrunjob", name)
    return Sample("deadline", lost, None)


def wait_steps(space: Space, name: str, steps: int) -> None:
    """Wait until the ranks have done so many steps since their start."""
    until(lambda: read_starts(space, name), "the ranks start")
    first = read_starts(space, name)[-1].resumed
    until(lambda: read_step(space, name) >= first + steps, f"{steps} steps after {first}")


def live_pods(space: Space, name: str, *phases: str) -> set[str]:
    """The pods of a job whose ranks may run, or those in the phases, by UID."""
    return {
        pod["metadata"]["uid"]
        for pod in _workers(space, name)
        if pod["status"]["phase"] in (phases or ("Pending", "Running"))
    }


def _workers(space: Space, name: str) -> list[Body]:
    labels = f"{names.JOB_LABEL}={name},{names.COMPONENT_LABEL}={names.WORKER}"
    response = space.api.get(PODS.path(space.name), params={"labelSelector": labels})
    pods: list[Body] = response.json()["items"]
    return pods


def _patch(space: Space, name: str, spec: JsonObject) -> None:
    patch = json.dumps({"spec": spec})
    space.kubectl("patch", "torchrunjob", name, "--type=merge", f"--patch={patch}")


@contextmanager
def suspend(space: Space, name: str) -> Iterator[None]:
    """By spec.suspend."""
    _patch(space, name, {"suspend": True})
    yield
    _patch(space, name, {"suspend": False})


@contextmanager
def preempt(space: Space, name: str) -> Iterator[None]:
    """By a job with a higher priority that needs the quota."""
    space.apply(job("urgent", QUEUE, ["true"], 1, priority=100))
    yield
    space.wait_phase("urgent", "Succeeded")
    space.kubectl("delete", "torchrunjob", "urgent")


@contextmanager
def resize(space: Space, name: str) -> Iterator[None]:
    """To one node or two, whichever the job does not have."""
    nodes = space.get(TORCHRUN_JOBS, name)["spec"]["numNodes"]
    _patch(space, name, {"numNodes": 3 - nodes})
    yield


def drain_of(local: LocalCluster) -> Request:
    """By the taint of a cloud on the machine of node 0, which the gang then leaves."""

    @contextmanager
    def drain(space: Space, name: str) -> Iterator[None]:
        machine = _workers(space, name)[0]["spec"]["nodeName"]
        space.kubectl("taint", "node", machine, f"{_LEAVING}=:NoSchedule")
        try:
            yield
        finally:
            space.kubectl("taint", "node", machine, f"{_LEAVING}-")

    return drain


def table(samples: list[Sample]) -> str:
    """Lost steps and seconds by source."""
    lines = ["source: stops, without loss, lost steps median (worst), seconds median (worst)"]
    for source in dict.fromkeys(sample.source for sample in samples):
        lost = [sample.lost for sample in samples if sample.source == source]
        seconds = [s.seconds for s in samples if s.source == source and s.seconds is not None]
        times = f"{statistics.median(seconds):.1f} s ({max(seconds):.1f} s)" if seconds else "-"
        median = statistics.median(lost)
        lines.append(f"{source}: {len(lost)}, {lost.count(0)}, {median:.0f} ({max(lost)}), {times}")
    return "\n".join(lines)
