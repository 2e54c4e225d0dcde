"""Reports of progress with real tokens, the real TokenReview and the real status."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.controller_process import NO_ELECTION, Api, ControllerProcess, eventually
from integration.team import Team
from torchrun_cluster import LocalCluster

AUDIENCE = "torchrun.ai/progress"


def controller_for(team: Team, crds: LocalCluster, folder: Path, *more: str) -> ControllerProcess:
    url = ("--progress-url", "http://controller.test:8081", "--progress-port", "0")
    return ControllerProcess(crds, folder, *url, "--namespace", team.name, *more)


class Reporter:
    """Sends reports to a controller."""

    def __init__(self, process: ControllerProcess) -> None:
        port = process.wait_for_line("serving")["progress_port"]
        self.url = f"http://127.0.0.1:{port}/v1/progress"

    def send(self, token: str, **values: object) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(
            self.url, json=values or {"step": 1}, headers=headers, timeout=60
        ).status_code


@pytest.fixture
def reporter(team: Team, crds: LocalCluster, tmp_path: Path) -> Iterator[Reporter]:
    process = controller_for(team, crds, tmp_path, *NO_ELECTION)
    with process.running():
        process.wait_for_line("controllers started")
        yield Reporter(process)


def token(team: Team, pod: str = "", audience: str = AUDIENCE) -> str:
    """Request a token bound to a pod, as the kubelet does."""
    path = f"{team.core}/serviceaccounts/default"
    eventually("the service account", lambda: team.api.get(path))
    spec: dict[str, Any] = {"audiences": [audience]}
    if pod:
        uid = team.api.get(f"{team.core}/pods/{pod}")["metadata"]["uid"]
        spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    made = team.api.create(f"{path}/token", {"spec": spec})
    return str(made["status"]["token"])


def running(team: Team, name: str, **spec: object) -> list[str]:
    """A job with running workers."""
    team.submit(name, **spec)
    pods = team.workers(name)
    for pod in pods:
        team.pod_becomes(pod, "Running")
    team.reaches(name, "Running")
    return pods


def progress(team: Team, name: str, step: int) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        report: dict[str, Any] = team.status(name).get("progress", {})
        return report if report.get("step") == step else None

    return eventually(f"step {step} of {name}", look)


def cells(crds: LocalCluster, team: Team, name: str, *columns: str) -> list[str]:
    """The cells of a job in wide columns. Other cells may be empty."""
    wide = crds.kubectl("get", "tj", name, "-n", team.name, "-o", "wide").stdout
    header, row = wide.splitlines()
    return [row[header.index(f" {column} ") + 1 :].split(" ", 1)[0] for column in columns]


def test_a_report_becomes_status_and_columns(
    reporter: Reporter, team: Team, crds: LocalCluster
) -> None:
    pods = running(team, "run")
    values = {"step": 12, "totalSteps": 100, "loss": 2.6052303314, "samplesPerSecond": 660.4361669}
    assert reporter.send(token(team, pods[0]), **values) == 204
    values |= {"loss": 2.605, "samplesPerSecond": 660.4}
    report = progress(team, "run", 12)
    assert {name: report[name] for name in values} == values
    assert report["time"]
    names = ("STEP", "OF", "LOSS", "SAMPLES/S")
    assert cells(crds, team, "run", *names) == ["12", "100", "2.605", "660.4"]


def test_a_checkpoint_is_in_the_status_and_in_the_next_gang(
    reporter: Reporter, team: Team, crds: LocalCluster
) -> None:
    pods = running(team, "saves", reliability={"maxRestarts": 1})
    last = {"step": 7, "path": "/checkpoints/ä 7", "time": "2026-01-02T03:04:05.678901Z"}
    assert reporter.send(token(team, pods[1]), checkpoints=[last]) == 403, "not node 0"
    assert reporter.send(token(team, pods[0]), checkpoints=[last]) == 204
    eventually("the checkpoint", lambda: team.status("saves").get("lastCheckpoint") == last)
    assert cells(crds, team, "saves", "CHECKPOINT") == ["7"]
    for pod in pods:
        team.pod_becomes(pod, "Failed")
    batch = f"/apis/batch/v1/namespaces/{team.name}/jobs/saves-r1"
    job = eventually("the next gang", lambda: team.api.get(batch))
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert json.loads(annotations["torchrun.ai/checkpoints"]) == [last]


def test_reports_write_the_status_once_in_ten_seconds(reporter: Reporter, team: Team) -> None:
    pods = running(team, "often")
    mine = token(team, pods[0])
    began = time.monotonic()
    assert reporter.send(mine, step=1) == 204
    progress(team, "often", 1)
    time.sleep(1.1)  # the rate limit of the endpoint
    assert reporter.send(mine, step=2) == 204
    assert progress(team, "often", 2)["step"] == 2
    # The first write was after `began`, in whole seconds, so up to one second early. A busy machine
    # sees the second write later, never sooner.
    assert time.monotonic() - began > 9


def test_a_pod_reports_for_its_own_job_only(reporter: Reporter, team: Team) -> None:
    mine = running(team, "mine")
    running(team, "theirs")
    assert reporter.send(token(team, mine[1]), step=5) == 204
    progress(team, "mine", 5)
    assert "progress" not in team.status("theirs")


def test_tokens_of_other_pods(reporter: Reporter, team: Team, api: Api) -> None:
    pods = running(team, "guarded")
    stranger = {
        "metadata": {"name": "stranger", "labels": {"torchrun-job-name": "guarded"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    api.create(f"{team.core}/pods", stranger)
    good = token(team, pods[0])
    head, payload, signature = good.split(".")
    forged = ".".join([head, payload, signature[:-6] + "AAAAAA"])
    codes = {
        "another audience": reporter.send(token(team, pods[0], audience="other")),
        "bound to no pod": reporter.send(token(team)),
        "bound to a pod of no gang": reporter.send(token(team, "stranger")),
        "forged": reporter.send(forged),
        "none": reporter.send("nothing"),
    }
    assert codes == {
        "another audience": 401,
        "bound to no pod": 403,
        "bound to a pod of no gang": 403,
        "forged": 401,
        "none": 401,
    }
    assert "progress" not in team.status("guarded")
    assert reporter.send(good, step=1) == 204


def test_reports_of_an_ended_gang_are_refused(reporter: Reporter, team: Team) -> None:
    pods = running(team, "again")
    old = token(team, pods[0])
    assert reporter.send(old, step=7) == 204
    progress(team, "again", 7)
    team.pod_becomes(pods[1], "Failed", json.dumps({"exitCode": 1, "message": "boom"}))
    eventually("a new gang", lambda: team.status("again").get("attempt") == 1)

    def is_refused() -> bool:
        code = reporter.send(old, step=8)
        assert code != 204
        return code in (401, 403)

    # Both gangs may report within the one second of the rate limit.
    eventually("the refusal", is_refused)
    # Names like "again-r1-0-...": pods of the new attempt.
    fresh = eventually(
        "new workers", lambda: [p for p in team.children("pods", "again") if "-r1-" in p]
    )
    new = token(team, fresh[0])
    eventually("the new gang's report", lambda: reporter.send(new, step=3) == 204)
    assert progress(team, "again", 3)["step"] == 3


def test_only_the_leader_accepts_reports(crds: LocalCluster, team: Team, tmp_path: Path) -> None:
    lease = ("--lease-name", "progress-test")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    leader = controller_for(team, crds, tmp_path / "one", *lease)
    standby = controller_for(team, crds, tmp_path / "two", *lease)
    with leader.running():
        leader.wait_for_line("controllers started")
        with standby.running():
            pods = running(team, "two")
            mine = token(team, pods[0])
            assert Reporter(standby).send(mine) == 503
            assert Reporter(leader).send(mine) == 204


def test_the_networks_of_a_gang_are_in_its_status(reporter: Reporter, team: Team) -> None:
    pods = running(team, "run", numNodes=2)
    networks = [
        {"transport": "IB", "nodes": 1},
        {"transport": "Socket", "device": "eth0", "nodes": 1, "firstNode": 1},
    ]
    report = {"count": 0, "last": [], "network": networks}
    assert reporter.send(token(team, pods[0]), restartsInPlace=report) == 204

    def slow() -> str:
        conditions = team.status("run").get("conditions", [])
        return "".join(c["message"] for c in conditions if c["type"] == "SlowNetwork")

    assert eventually("the condition", slow) == "Node 1 uses Socket over eth0, the other IB."
    assert team.status("run")["network"] == networks
