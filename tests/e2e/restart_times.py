"""Seconds from a failure to the first step after it, in the same pods and with a new gang.

    RUNS=30 make restart-times     measures, in turns, with real pods and real torch
    python -m e2e.restart_times    stores the last measurement, and writes the table in docs/design.md

Both times are printed by the script itself, in pods of one machine: the failing rank just before it
fails, and rank 0 after the first collective operation of the new processes.
"""

import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from e2e.cluster import ROOT
from e2e.manifests import job
from e2e.space import Space
from torchrun_api import names
from torchrun_api.json import JsonObject

Scope = Literal["InPlace", "Gang"]
Failure = Literal["SIGKILL", "exception"]
SCOPES: tuple[Scope, ...] = ("InPlace", "Gang")
FAILURES: dict[Failure, str] = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "exception": "raise ValueError('loss is nan')",
}
LATEST = ROOT / "build" / "restart-times.json"
KEPT = ROOT / "bench" / "results" / "restart-times.json"
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- times: written by tests/e2e/restart_times.py -->", "<!-- end of times -->"

_SCRIPT = """
import os, signal, time
began = time.time()
import torch, torch.distributed as dist
imported = time.time() - began
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
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


class Measurement(msgspec.Struct, frozen=True):
    """The restarts of one run. `kubelet`: seconds from the end of a container to its next start."""

    date: str
    samples: list[Sample]
    kubelet: list[float]


def measure(space: Space, scope: Scope, failure: Failure, name: str) -> Sample:
    """Run a job of two nodes that fails once, and read the times from its logs."""
    script = _SCRIPT.format(fail=FAILURES[failure])
    reliability: JsonObject = {"restartScope": scope}
    space.apply(
        job(
            name,
            "torch",
            ["python3", "-c", script],
            2,
            launcher="torchrun",
            reliability=reliability,
        )
    )
    status = space.wait_phase(name, "Succeeded")
    is_in_place = (status.get("attempt", 0), status.get("restartsInPlace", 0)) == (0, 1)
    assert (status["restarts"], is_in_place) == (1, scope == "InPlace")
    pods = f"{names.JOB_LABEL}={name},{names.COMPONENT_LABEL}={names.WORKER}"
    log = space.kubectl("logs", "-l", pods, "-c", "trainer", "--tail=-1")
    lines = [line.split() for line in log.splitlines()]
    failed = next(float(words[1]) for words in lines if words[:1] == ["fails"])
    continued, imported = next(
        map(float, words[2:]) for words in lines if words[:2] == ["continues", "0"]
    )
    space.kubectl("delete", "torchrunjob", name)
    return Sample(scope, failure, continued - failed, imported)


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


def store(samples: list[Sample], kubelet: list[float]) -> None:
    """Write the measurement for `main`."""
    LATEST.parent.mkdir(exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    LATEST.write_bytes(msgspec.json.encode(Measurement(day, samples, kubelet)))


def table(measurement: Measurement) -> str:
    """The table of the page: medians and worst times by failure, in seconds."""
    head = ("failure", "in the same pods: median (worst)", "new gang: median (worst)", "ratio")
    rows = [head, ("---",) * len(head)]
    for failure in FAILURES:
        times = {
            scope: [
                s.seconds for s in measurement.samples if (s.scope, s.failure) == (scope, failure)
            ]
            for scope in SCOPES
        }
        medians = {scope: statistics.median(times[scope]) for scope in SCOPES}
        cells = (f"{medians[scope]:.1f} s ({max(times[scope]):.1f} s)" for scope in SCOPES)
        rows.append((failure, *cells, f"{medians['InPlace'] / medians['Gang']:.2f}"))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    waits = ", ".join(f"{seconds:.0f} s" for seconds in measurement.kubelet)
    kubelet = (
        f"The kubelet waited {waits} before its first restarts of a container that failed at once."
    )
    return "\n".join([*lines, "", _note(measurement.samples, measurement.date), "", kubelet])


def _note(samples: Sequence[Sample], date: str) -> str:
    imported = statistics.median(sample.imported for sample in samples)
    each = len(samples) // (len(SCOPES) * len(FAILURES))
    return (
        f"Seconds from the failure of a rank to the first step after it, {each} times each and in"
        f" turns,\non two nodes of one machine with two cores. The import of torch takes"
        f" {imported:.1f} s of each\n({date}, `RUNS={each} make restart-times`)."
    )


def write_page(page: str, measurement: Measurement) -> str:
    """Return the page with the table. Raises ValueError without the two comments."""
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:before]}\n\n{table(measurement)}\n\n{page[after:]}"


def main() -> int:
    """Store the last measurement, and write the page."""
    measurement = msgspec.json.decode(LATEST.read_bytes(), type=Measurement)
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(measurement), indent=1) + b"\n")
    PAGE.write_text(write_page(PAGE.read_text(), measurement))
    return 0


if __name__ == "__main__":
    sys.exit(main())
