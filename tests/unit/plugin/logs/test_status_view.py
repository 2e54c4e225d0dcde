"""The view of one job."""

import json
import re
from datetime import UTC, datetime, timedelta

import click
import pytest
from msgspec.structs import replace

from kubectl_torchrun.cluster.slices import JobStatusSlice, ProgressSlice
from kubectl_torchrun.logs.copies import Place
from kubectl_torchrun.logs.failure_report import TAIL, attempt_and_node, of_ranks
from kubectl_torchrun.logs.progress_line import progress_line

from ..laptop import Laptop

WAITS = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
DIED = {"terminated": {"exitCode": 3, "reason": "Error"}}


def a_job(laptop: Laptop) -> None:
    condition = {"type": "Scheduled", "status": "False", "reason": "R", "message": "no GPUs " * 20}
    laptop.job(
        "run",
        status={
            "phase": "Running",
            "reason": "WorkersRunning",
            "message": "1 of 2 pods is running.",
            "workersStatus": "1/2 ready",
            "gpus": 16,
            "attempt": 1,
            "restarts": 1,
            "progress": {"step": 50, "totalSteps": 200, "loss": 2.5, "samplesPerSecond": 1234.5},
            "attempts": [{"number": 0, "endTime": "2026-01-01T00:00:00Z", "message": "rank 1"}],
            "conditions": [condition],
        },
    )
    laptop.worker("run", 0, 0)
    laptop.worker("run", 0, 1)
    laptop.worker("run", 1, 1, **WAITS)
    laptop.worker("run", 2, 1, **DIED)


@pytest.mark.long
def test_one_view_without_a_terminal(laptop: Laptop) -> None:
    a_job(laptop)
    result = laptop.run("status", "run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("run   queue q   nodes 2 (16 GPUs)   age")
    assert lines[1] == "Running   1/2 ready"
    assert lines[2] == f"step 50 of 200 [{'#' * 6}{'-' * 18}] 25%   loss 2.5   1,234 samples/s"
    assert "  WorkersRunning: 1 of 2 pods is running." in lines
    assert "  attempt 0 ended at 00:00:00 UTC: rank 1" in lines
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["POD", "MACHINE", "PHASE", "AGE", "REASON"]
    assert [line.split()[0] for line in table[1:]] == ["run-r1-1", "run-r1-2", "run-r1-0"]
    assert table[1].endswith("ImagePullBackOff no such image")
    assert table[2].endswith("Error (exit code 3)")
    assert "\x1b" not in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_any_size_of_the_screen_works(laptop: Laptop, width: int) -> None:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.cluster.session import session
    from kubectl_torchrun.cluster.slices import JOBS, PODS
    from kubectl_torchrun.logs import status_view as status

    a_job(laptop)
    with session(Target(str(laptop.kubeconfig), "", "ns")) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, "run"))
        pods = list(cluster.run(lambda api: api.list(PODS)).items) * 30
    lines = [click.unstyle(line) for line in status.view(job, pods, width, 24)]
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    assert lines[-1].startswith("... and ")


@pytest.mark.long
@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_watching_without_a_terminal_prints_changes_until_the_end(
    laptop: Laptop, phase: str, code: int
) -> None:
    laptop.job("run", status={"phase": "Running", "reason": "Up"})
    end = {"phase": phase, "reason": "Why"}
    laptop.once_watched(lambda: laptop.job("run", status=end))
    result = laptop.run("status", "run", "--watch")
    assert result.exit_code == code
    assert [line.split() for line in result.stderr.splitlines()] == [
        ["Running", "Up"],
        [phase, "Why"],
    ]


@pytest.mark.long
def test_the_wide_view_is_not_cut(laptop: Laptop) -> None:
    a_job(laptop)
    out = laptop.run("status", "run", "-o", "wide").stdout
    assert re.search(r"(?m)^POD +MACHINE +PHASE +AGE +IP +REASON$", out)
    assert "no GPUs " * 19 in out


@pytest.mark.long
def test_a_job_that_is_deleted_during_the_watch(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.once_watched(lambda: laptop.server.delete("torchrunjobs", "run"))
    result = laptop.run("status", "run", "--watch")
    assert result.exit_code == 1
    assert "was deleted" in result.stderr


@pytest.mark.long
def test_machine_readable_output(laptop: Laptop) -> None:
    a_job(laptop)
    assert json.loads(laptop.run("status", "run", "-o", "json").stdout)["status"]["gpus"] == 16
    assert laptop.run("status", "run", "-o", "json", "--watch").exit_code == 2


MORE_THAN_A_DAY = 131_400  # seconds: 36 h 30 min


@pytest.mark.parametrize(
    ("progress", "status", "expected"),
    [
        pytest.param({"step": 7}, {}, "step 7   9h ago", id="no rate"),
        pytest.param(
            {"step": 7, "steps_per_second": 4.217},
            {},
            "step 7   4.22 steps/s   9h ago",
            id="no total",
        ),
        pytest.param(
            {"step": 0, "total_steps": MORE_THAN_A_DAY, "steps_per_second": 1.0},
            {"estimated_remaining_seconds": MORE_THAN_A_DAY},
            f"step 0 of {MORE_THAN_A_DAY} [{'-' * 24}] 0%   1 steps/s   ETA 36h   9h ago",
            id="a total",
        ),
        pytest.param(
            {"step": 10, "total_steps": 10, "steps_per_second": 2.0},
            {"estimated_remaining_seconds": 0},
            f"step 10 of 10 [{'#' * 24}] 100%   2 steps/s   ETA 0s   9h ago",
            id="the last step",
        ),
        pytest.param(
            {"step": 7, "steps_per_second": 0.08},
            {},
            "step 7   12.5 s/step   9h ago",
            id="slow steps",
        ),
        pytest.param(
            {"step": 7, "total_steps": 9, "steps_per_second": 0.0, "loss": 2.5},
            {},
            f"step 7 of 9 [{'#' * 19}{'-' * 5}] 78%   loss 2.5   9h ago",
            id="no steps",
        ),
        pytest.param(
            {"step": 5, "total_steps": 10, "steps_per_second": 1.0},
            {"phase": "Queued"},
            f"step 5 of 10 [{'#' * 12}{'-' * 12}] 50%   9h ago",
            id="a job that waits",
        ),
    ],
)
def test_progress_in_a_line(
    progress: dict[str, float], status: dict[str, object], expected: str
) -> None:
    time = datetime.now(UTC) - timedelta(hours=9, minutes=10)
    reported = replace(ProgressSlice(time=time), **progress)
    job_status = replace(JobStatusSlice(phase="Running", progress=reported), **status)
    assert progress_line(job_status, 80) == expected


def test_a_narrow_line_has_no_bar() -> None:
    status = JobStatusSlice(progress=ProgressSlice(step=7, total_steps=9))
    assert "#" not in progress_line(status, 60)


@pytest.mark.long
def test_the_status_of_a_running_job_has_rate_and_eta(laptop: Laptop) -> None:
    progress = {
        "step": 0,
        "totalSteps": MORE_THAN_A_DAY,
        "stepsPerSecond": 1,
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    status = {"progress": progress, "estimatedRemainingSeconds": MORE_THAN_A_DAY}
    laptop.job("run", status={"phase": "Running", **status})
    assert f"step 0 of {MORE_THAN_A_DAY} [" in laptop.run("status", "run").stdout
    for command in ("status", "why"):
        assert "0%   1 steps/s   ETA 36h" in laptop.run(command, "run").stdout
    laptop.job("run", status={"phase": "Queued", "progress": progress})
    assert "ETA" not in laptop.run("status", "run").stdout


@pytest.mark.long
def test_why_prints_the_attempts_and_the_last_lines(laptop: Laptop) -> None:
    a_job(laptop)
    failure = {"message": "run-r1-2: exit code 3", "reason": "Error"}
    status = laptop.server.objects["torchrunjobs", "run"]["status"]
    assert isinstance(status, dict)
    laptop.job("run", status={**status, "lastFailure": failure})
    laptop.server.logs["run-r1-2"] = ["boom\n"]
    out = laptop.run("why", "run").stdout
    assert "Last lines of pod run-r1-2:\n  boom" in out
    assert "  progress: step 50 of 200" in out


@pytest.mark.long
def test_why_is_also_for_programs(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Queued", "reason": "NoQuota", "queuePosition": 2})
    report = json.loads(laptop.run("why", "run", "-o", "json").stdout)
    assert report == {
        "job": "run",
        "namespace": "ns",
        "phase": "Queued",
        "reason": "NoQuota",
        "message": "",
        "failure": None,
        "attempt": None,
        "node": None,
        "rank": None,
        "machine": None,
        "exitCode": None,
        "evidence": [],
        "nextCommand": f"kubectl torchrun queues -n ns --kubeconfig={laptop.kubeconfig}",
    }
    failure = {
        "reason": "Exception",
        "message": "pod run-r1-2: bad batch",
        "rank": 5,
        "node": "gpu-07",
        "exitCode": 1,
    }
    status = {"phase": "Failed", "reason": "Exception", "message": "m", "lastFailure": failure}
    laptop.job("run", status=status)
    laptop.worker("run", 2, 1, "ValueError: bad batch\n", terminated={"exitCode": 1})
    report = json.loads(laptop.run("why", "run", "-o", "json").stdout)
    assert report["failure"] == "Exception: pod run-r1-2: bad batch"
    place = ("attempt", "node", "rank", "machine", "exitCode")
    assert [report[name] for name in place] == [1, 2, 5, "gpu-07", 1]
    assert report["evidence"] == ["ValueError: bad batch"]
    assert "torchrun logs run --attempt 1 --node 2 " in report["nextCommand"]


@pytest.mark.long
def test_why_names_a_failure_that_repeats(laptop: Laptop) -> None:
    end = {"reason": "Exception", "message": "Pod run-0-abcde: ValueError: bad batch (rank 0)."}
    laptop.job("run", status={"attempts": [{"number": number, **end} for number in range(3)]})
    out = laptop.run("why", "run").stdout
    assert "  The last 3 attempts failed within a minute with the same exception" in out
    assert "before the first step: ValueError: bad batch\n  This is an error in the code." in out


# The failure table that torchrun 2.9 prints after the output of its ranks.
TORCHRUN = [
    b"E1122 01:24:22.512000 42 site-packages/torch/distributed/elastic/multiprocessing/api.py:882]"
    b" failed (exitcode: 1) local_rank: 0 (pid: 55) of binary: /bin/sh",
    b"Traceback (most recent call last):",
    *[b"  a frame of torchrun"] * 30,
    b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    b"Root Cause (first observed failure):",
    b"[0]:",
    b"  rank      : 1 (local_rank: 0)",
]


def test_why_omits_the_failure_table_of_torchrun() -> None:
    lines = [b"step 3", b"Traceback (most recent call last):", b"ValueError: bad batch"]
    assert of_ranks([*lines, *TORCHRUN]) == lines
    marked = [b"[default1]:" + line for line in lines]
    assert of_ranks([*marked[:1], *TORCHRUN, *marked[1:]]) == marked, "lines of ranks stay"
    assert of_ranks([b"step %d" % step for step in range(99)])[0] == b"step %d" % (99 - TAIL)
    assert of_ranks(TORCHRUN) == TORCHRUN[-TAIL:], "the table is better than no output"


@pytest.mark.long
def test_why_reads_the_copied_log_of_a_deleted_pod(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job(laptop)
    status = laptop.server.objects["torchrunjobs", "run"]["status"]
    assert isinstance(status, dict)
    failure = {"message": "pod run-1-abcde: no progress report and no output", "reason": "Hung"}
    laptop.job("run", status={**status, "lastFailure": failure})
    requests: list[tuple[object, ...]] = []

    def lines(place: Place, attempt: int, node: int, tail: int | None) -> list[bytes]:
        requests.append((place.pod, attempt, node, tail))
        return [b"where it stood"]

    monkeypatch.setattr(Place, "lines", lines)
    out = laptop.run("why", "run").stdout
    assert "Last lines of node 1 in attempt 0:\n  where it stood" in out
    assert requests == [("run-r0-0", 0, 1, 400)]
    for pod in ("run-r0-0", "run-r1-0"):
        laptop.server.delete("pods", pod)
    out = laptop.run("why", "run").stdout
    assert "The pod was deleted. The job's PVC may have a copy of its log: kubectl" in out
    assert "logs run --attempt 0" in out


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pod run-0-abcde: boom", (0, 0)),
        ("pod run-r12-3-abcde: boom", (12, 3)),
        ("run-r1-2: exit code 3", (1, 2)),
        ("pod other-run-0-abcde: boom", None),
        ("Job run failed", None),
    ],
)
def test_which_copy_is_read(message: str, expected: tuple[int, int] | None) -> None:
    assert attempt_and_node("run", message) == expected


@pytest.mark.long
def test_why_shows_a_broken_edit_of_a_running_pod(laptop: Laptop) -> None:
    laptop.job("run", spec={"jobQueue": "q", "development": True}, status={"phase": "Running"})
    laptop.worker("run", 0)
    laptop.worker("run", 1)
    waits = "torchrun-launch: waiting for the next edit: kubectl torchrun sync (10 s)"
    laptop.server.logs["run-r0-0"] = ["step 1\n"]
    laptop.server.logs["run-r0-1"] = ["SyntaxError: invalid syntax\n", *[f"{waits}\n"] * 200]
    out = laptop.run("why", "run").stdout
    assert "  node 1: the command failed. Its pod waits for the next edit: " in out
    assert "Last lines of pod run-r0-1:\n  SyntaxError: invalid syntax" in out
    assert "waiting for" not in out
    line = "  node 1: the command failed. Its pod waits for the next edit: kubectl"
    assert line in laptop.run("status", "run").stdout
    laptop.server.logs["run-r0-1"].append("torchrun-launch: starting round 3\n")
    assert "next edit" not in laptop.run("why", "run").stdout
    assert "next edit" not in laptop.run("status", "run").stdout
