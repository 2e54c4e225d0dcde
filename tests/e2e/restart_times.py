"""Seconds from a failure to the first step after it, in the same pods and with a new gang.

    RUNS=30 make restart-times     measures, in turns, with real pods and real torch, and prints a table

All times are by the clock of one machine: the failing rank prints it just before it fails, and rank 0
prints it after the first collective operation of the new processes.
"""

import statistics
from collections.abc import Iterator
from typing import Literal

import msgspec

from e2e.manifests import job
from e2e.space import Space, until
from torchrun_api import names
from torchrun_api.json import JsonObject

# InPlace: the gang keeps its pods. Gang: a new gang follows.
Scope = Literal["InPlace", "Gang"]
Failure = Literal["SIGKILL", "exception", "hang"]
SCOPES: tuple[Scope, ...] = ("InPlace", "Gang")
# What rank 1 does.
FAILURES: dict[Failure, str] = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "exception": "raise ValueError('loss is nan')",
    "hang": "time.sleep(1000)",
}
HANG_SECONDS = 10

_SCRIPT = """
import os, signal, time
began = time.time()
import torch, torch.distributed as dist
imported = time.time() - began
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("trains", flush=True)  # a hang is noticed after the first output of rank 0
if os.environ["TORCHRUN_ATTEMPT"] == os.environ["TORCHRUN_ROUND"] == "0":
    if os.environ["RANK"] == "1":
        print("fails", time.time(), flush=True)
        {fail}
    time.sleep(1000)
print("continues", os.environ["RANK"], time.time(), imported, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


# Writes when it starts and ends, fails three times, and prints all of it at last.
_FAILS = """
import os, time
with open("/times/all", "a+") as file:
    file.seek(0)
    before = file.read().split()
    print(time.time(), file=file, flush=True)
    if len(before) < 6:
        print(time.time(), file=file, flush=True)
        os._exit(1)
    file.seek(0)
    print(file.read())
"""


class Sample(msgspec.Struct, frozen=True):
    """One restart. `seconds` from the failure to the first step, `imported` those of torch."""

    scope: Scope
    failure: Failure
    seconds: float
    imported: float


def measure(space: Space, scope: Scope, failure: Failure, name: str) -> Sample:
    """Run a job of two nodes that fails once, and read the times from its logs."""
    script = _SCRIPT.format(fail=FAILURES[failure])
    hang: JsonObject = {"hangTimeoutSeconds": HANG_SECONDS} if failure == "hang" else {}
    spec: JsonObject = {"launcher": "torchrun", "reliability": {"restartScope": scope, **hang}}
    space.apply(job(name, "torch", ["python3", "-c", script], 2, **spec))
    failed_at: float | None = None
    if failure == "hang":
        until(lambda: "fails" in _log(space, name, "0", 1), f"rank 1 of {name} trains")
        failed_at = _printed_failure(space, name)  # a new gang deletes this pod with its log
    status = space.wait_phase(name, "Succeeded")
    attempt = status.get("attempt", 0)
    assert attempt == (0 if scope == "InPlace" else 1)
    assert status.get("restarts") == 1
    if failed_at is None:
        failed_at = _printed_failure(space, name)
    _, _, continued_at, imported = next(_split_lines(space, name, str(attempt), 0, "continues"))
    space.kubectl("delete", "torchrunjob", name)
    return Sample(scope, failure, float(continued_at) - failed_at, float(imported))


def _printed_failure(space: Space, name: str) -> float:
    """The time at which rank 1 fails, by its log."""
    return next(float(words[1]) for words in _split_lines(space, name, "0", 1, "fails"))


def _log(space: Space, name: str, attempt: str, index: int) -> str:
    """The output of a node in an attempt; "" before it exists."""
    labels = {names.JOB_LABEL: name, names.ATTEMPT_LABEL: attempt}
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    pods = f"{selector},{names.COMPLETION_INDEX_LABEL}={index}"
    return space.kubectl("logs", "-l", pods, "-c", "trainer", "--tail=-1", check=False)


def _split_lines(
    space: Space, name: str, attempt: str, index: int, word: str
) -> Iterator[list[str]]:
    lines = (line.split() for line in _log(space, name, attempt, index).splitlines())
    return (words for words in lines if words[:1] == [word])


def measure_kubelet(space: Space, restarts: int = 3) -> list[float]:
    """Let a container of a plain Job fail, and return the waits until the kubelet starts it."""
    container: JsonObject = {
        "name": "fails",
        "image": space.cluster.controller,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", _FAILS],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "times", "mountPath": "/times"}],
    }
    pod: JsonObject = {
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [{"name": "times", "emptyDir": {}}],
    }
    body: JsonObject = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "kubelet"},
        "spec": {"backoffLimit": 10, "template": {"spec": pod}},
    }
    space.apply(body)
    space.kubectl("wait", "job/kubelet", "--for=condition=Complete", "--timeout=180s")
    times = [float(word) for word in space.kubectl("logs", "job/kubelet").split()]
    return [start - end for end, start in zip(times[1::2], times[2::2], strict=True)][:restarts]


def table(samples: list[Sample], kubelet: list[float]) -> str:
    """Medians and worst times by failure, in seconds."""
    lines = ["failure: times, pods kept: median (worst), new gang: median (worst), ratio"]
    for failure in FAILURES:
        times = {
            scope: [s.seconds for s in samples if (s.scope, s.failure) == (scope, failure)]
            for scope in SCOPES
        }
        medians = {scope: statistics.median(times[scope]) for scope in SCOPES}
        cells = (f"{medians[scope]:.1f} s ({max(times[scope]):.1f} s)" for scope in SCOPES)
        ratio = f"{medians['InPlace'] / medians['Gang']:.2f}"
        lines.append(f"{failure}: {len(times['Gang'])}, {', '.join(cells)}, {ratio}")
    imported = statistics.median(sample.imported for sample in samples)
    waits = ", ".join(f"{seconds:.0f} s" for seconds in kubelet)
    lines.append(f"import of torch: {imported:.1f} s of each; waits of the kubelet: {waits}")
    return "\n".join(lines)
