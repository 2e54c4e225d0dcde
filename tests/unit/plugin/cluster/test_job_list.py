"""list and queues."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from aiohttp import web

from kubectl_torchrun.output import age, columns, duration

from ..api_server import refusal
from ..laptop import Laptop

PROGRESS = {"step": 1200, "totalSteps": 5000, "loss": 2.31}


def some_jobs(laptop: Laptop) -> None:
    laptop.job(
        "young",
        metadata={"creationTimestamp": "2026-01-02T00:00:00Z", "labels": {"team": "a"}},
        status={"phase": "Running", "reason": "WorkersRunning", "progress": PROGRESS},
    )
    laptop.job(
        "old",
        metadata={"creationTimestamp": "2026-01-01T00:00:00Z"},
        spec={"jobQueue": "other", "numGPUs": 12},
        status={"phase": "Queued", "reason": "Unschedulable"},
    )


@pytest.mark.long
def test_the_job_list_has_the_main_columns_and_the_newest_last(laptop: Laptop) -> None:
    some_jobs(laptop)
    result = laptop.run("list")
    assert result.exit_code == 0, result.output
    rows = [line.split("   ") for line in result.stdout.splitlines()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[0] == ["NAME", "QUEUE", "NODES", "PHASE", "PROGRESS", "AGE", "REASON"]
    assert [row[:5] for row in rows[1:]] == [
        ["old", "other", "12 GPUs", "Queued", "-"],
        ["young", "q", "2", "Running", "1200/5000"],
    ]
    assert [row[6] for row in rows[1:]] == ["Unschedulable", "WorkersRunning"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--queue", "other"], ["old"]),
        (["--phase", "Running"], ["young"]),
        (["--phase", "Running", "--phase", "Queued"], ["old", "young"]),
        (["--phase", "running", "--phase", "QUEUED"], ["old", "young"]),
        (["--phase", "timedout"], []),
        (["-l", "team=a"], ["young"]),
        (["-A"], ["old", "young"]),
    ],
)
def test_jobs_can_be_filtered(laptop: Laptop, arguments: list[str], names: list[str]) -> None:
    some_jobs(laptop)
    result = laptop.run("list", "-o", "name", *arguments)
    found = sorted(line.removeprefix("torchrunjob.torchrun.ai/") for line in result.stdout.split())
    assert found == names


@pytest.mark.long
def test_jobs_without_a_phase_are_new(laptop: Laptop) -> None:
    laptop.job("fresh", status={})
    assert laptop.run("list", "--phase", "new", "-o", "name").stdout == (
        "torchrunjob.torchrun.ai/fresh\n"
    )


def test_an_unknown_phase_is_refused_with_the_valid_ones(laptop: Laptop) -> None:
    result = laptop.run("list", "--phase", "done")
    assert result.exit_code == 2
    assert "Unknown phase done. Valid phases: Pending, Syncing, Queued, Running," in result.stderr
    assert not laptop.server.requests


@pytest.mark.long
def test_wide_tables_have_more_columns(laptop: Laptop) -> None:
    some_jobs(laptop)
    status = {"phase": "Failed", "reason": "Error", "message": "rank 1", "gpus": 16, "restarts": 2}
    spec = {"jobQueue": "q", "numNodes": 2, "image": "i:1"}
    created = {"creationTimestamp": "2026-01-03T00:00:00Z"}
    laptop.job("wide", metadata=created, spec=spec, status=status)
    head, *_, last = laptop.run("list", "-o", "wide").stdout.splitlines()
    assert head.split()[-4:] == ["GPUS", "RESTARTS", "IMAGE", "MESSAGE"]
    assert [cell.strip() for cell in last.split("   ") if cell.strip()][-4:] == [
        *("16", "2", "i:1", "rank 1"),
    ]
    queue = {
        "scheduling": {"scheduler": "volcano"},
        "storage": {"workspace": {"storageClassName": "fast"}},
    }
    laptop.server.put("torchrunqueues", "a", spec=queue)
    laptop.server.put("torchrunqueues", "b", spec={})
    head, first, second = laptop.run("queues", "-o", "wide").stdout.splitlines()[:3]
    assert head.split()[-2:] == ["SCHEDULER", "STORAGECLASS"]
    assert first.split()[-2:] == ["volcano", "fast"]
    assert second.split()[-2:] == ["-", "-"]


@pytest.mark.long
def test_json_output_has_complete_objects(laptop: Laptop) -> None:
    some_jobs(laptop)
    listed = json.loads(laptop.run("list", "-o", "json", "--queue", "other").stdout)
    assert (listed["kind"], len(listed["items"])) == ("List", 1)
    assert listed["items"][0]["kind"] == "TorchrunJob"
    assert listed["items"][0]["spec"]["numGPUs"] == 12
    assert yaml.safe_load(laptop.run("queues", "-o", "yaml").stdout)["items"][0]["kind"] == (
        "TorchrunQueue"
    )


@pytest.mark.long
def test_an_empty_list_is_reported_on_stderr(laptop: Laptop) -> None:
    result = laptop.run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No jobs found in namespace ns." in result.stderr
    assert "No jobs of queue gpu found." in laptop.run("list", "-A", "--queue", "gpu").stderr
    laptop.server.delete("torchrunqueues", "q")
    assert "No TorchrunQueues found in namespace ns" in laptop.run("queues").stderr


@pytest.mark.long
def test_a_forbidden_list_of_all_namespaces_names_the_flag(laptop: Laptop) -> None:
    def forbid(request: web.Request) -> web.Response | None:
        return None if "/namespaces/" in request.path else refusal(403, "cannot list")

    laptop.server.hooks.append(forbid)
    for command in ("list", "queues"):
        result = laptop.run(command, "-A")
        assert result.exit_code == 4
        assert "Remove --all-namespaces" in result.stderr


@pytest.mark.long
def test_queues_count_their_jobs(laptop: Laptop) -> None:
    some_jobs(laptop)
    spec = {"image": "i", "weight": 2, "quota": {"gpus": 16}, "nodeResources": {"gpus": 8}}
    laptop.server.put("torchrunqueues", "q", spec=spec)
    laptop.server.put("torchrunqueues", "other")
    lines = laptop.run("queues").stdout.splitlines()
    assert lines[0].split() == [
        *("NAME", "USED", "WEIGHT", "QUOTA", "RUNNING", "WAITING", "GPUS/NODE", "AGE", "IMAGE"),
    ]
    assert lines[1].split() == ["other", "-", "-", "-", "0", "1", "0", "-"]
    assert lines[2].split() == ["q", "-", "2", "gpus=16", "1", "0", "8", "i"]
    assert len(lines) == 3, "nobody waits to be admitted"


@pytest.mark.long
@pytest.mark.parametrize(
    ("admission", "shown"),
    [
        ({"used": {"gpus": 16}, "free": {"gpus": 4}, "summary": "16/20 GPUs"},
         "[########--] 16/20 GPUs"),
        ({"used": {"gpus": 2, "cpu": "500m"}, "free": {"gpus": 2, "cpu": "500m"},
          "summary": "2/4 GPUs"}, "[#####-----] 2/4 GPUs"),
        ({"used": {"memory": "1Gi", "jobs": 1}, "free": {"memory": "3Gi", "jobs": 1},
          "summary": "s"}, "[#####-----] s"),
        ({"used": {"gpus": 199}, "free": {"gpus": 1}, "summary": "s"}, "[#########-] s"),
        ({"used": {"gpus": 8}, "free": {"gpus": 0}, "summary": "s"}, "[##########] s"),
        ({"used": {}, "free": {"gpus": 8}, "summary": "0/8 GPUs"}, "[----------] 0/8 GPUs"),
        ({"used": {"gpus": 8}, "summary": "8 GPUs"}, "8 GPUs"),
        ({"free": {"gpus": 0}}, "-"),
    ],
)  # fmt: skip
def test_a_bar_shows_the_scarcest_quota_of_a_queue(
    laptop: Laptop, admission: dict[str, object], shown: str
) -> None:
    laptop.server.put("torchrunqueues", "q", status={"admission": admission})
    cells = laptop.run("queues").stdout.splitlines()[1].split("   ")
    assert [cell.strip() for cell in cells if cell.strip()][:3] == ["q", shown, "-"]


@pytest.mark.long
def test_waiting_jobs_are_listed_by_position_with_their_reason(laptop: Laptop) -> None:
    def waits(place: int | None, message: str) -> dict[str, object]:
        admitted = {"type": "Admitted", "status": "False", "reason": "R", "message": message}
        return {"phase": "Queued", "queuePosition": place, "conditions": [admitted]}

    ahead = "2nd in q, needs 16 GPUs on 2 nodes, 8 GPUs free, next: x ends or is preempted"
    laptop.job("late", status=waits(10, "10th in q"))
    laptop.job("new", status=waits(None, ""))
    laptop.job("soon", status=waits(2, ahead))
    laptop.job("first", spec={"jobQueue": "other", "numGPUs": 12}, status=waits(1, "1st"))
    laptop.job("runs", status={**waits(1, "grows"), "phase": "Running"})
    admitted = [{"type": "Admitted", "status": "True", "message": "m"}]
    laptop.job("starts", status={"phase": "Queued", "conditions": admitted})
    table = laptop.run("queues").stdout.partition("\n\n")[2].splitlines()
    assert table[0].split() == ["QUEUE", "POSITION", "JOB", "NODES", "AGE", "REASON"]
    rows = [[cell.strip() for cell in row.split("   ") if cell.strip()] for row in table[1:]]
    assert rows == [
        ["other", "1", "first", "12 GPUs", "1st"],
        ["q", "2", "soon", "2", ahead],
        ["q", "10", "late", "2", "10th in q"],
        ["q", "-", "new", "2", "R"],
    ]


@pytest.mark.long
def test_queues_without_the_right_to_see_jobs(laptop: Laptop) -> None:
    def forbid(request: web.Request) -> web.Response | None:
        return refusal(403, "cannot list") if request.path.endswith("jobs") else None

    laptop.server.hooks.append(forbid)
    result = laptop.run("queues")
    assert result.exit_code == 0
    assert "Cannot count jobs: cannot list" in result.stderr


def test_a_narrow_screen_has_fewer_columns() -> None:
    rows = [["a-job", "queue", "why " * 20]]
    head = ("NAME", "QUEUE", "REASON")
    assert columns(head, rows)[1].endswith("why why")
    wide = columns(head, rows, 60, ("QUEUE",))
    assert wide[0].split() == ["NAME", "QUEUE", "REASON"]
    assert len(wide[1]) == 60
    assert wide[1].endswith("…")
    narrow = columns(head, rows, 30, ("QUEUE",))
    assert narrow[0].split() == ["NAME", "REASON"]
    assert all(len(line) <= 30 for line in narrow)


def test_ages_have_the_format_of_kubectl() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert age(None) == ""
    assert age(now + timedelta(seconds=5), now) == "0s"
    seconds = [0, 119, 120, 200, 599, 3600, 4 * 3600 + 60, 9 * 3600, 50 * 3600]
    assert [duration(n) for n in seconds] == [
        *("0s", "119s", "2m", "3m20s", "9m59s", "60m", "4h1m", "9h", "2d"),
    ]
