"""The controller process during faults around it, and while it is idle."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.audit import AuditLog
from integration.controller_process import (
    NO_ELECTION,
    Api,
    ControllerProcess,
    eventually,
    install_crds,
)
from integration.team import WORKSPACE, Team
from torchrun_cluster import LocalCluster, Size

# The long run uses TORCHRUN_TEST_SILENCE=60.
SILENCE_SECONDS = float(os.environ.get("TORCHRUN_TEST_SILENCE", "10"))
FINISHED_JOBS = 1000


@pytest.fixture(scope="module")
def cluster(audit: AuditLog) -> Iterator[LocalCluster]:
    name, extra = f"test-faults-{os.getpid()}", {"kube-apiserver": audit.flags}
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=extra) as running:
        install_crds(running)
        yield running


def births(team: Team, path: str, version: str) -> Counter[str]:
    """The number of creations of each name since a resourceVersion."""
    query = f"?watch=true&resourceVersion={version}&timeoutSeconds=3"
    present = {item["metadata"]["name"] for item in team.api.items(path)}

    def look() -> Counter[str] | None:
        events = [json.loads(line) for line in team.api.text(path + query).splitlines()]
        names = Counter(e["object"]["metadata"]["name"] for e in events if e["type"] == "ADDED")
        return names if present <= names.keys() else None  # events come in their order

    return eventually("the history up to now", look)


def present_version(team: Team) -> str:
    version: str = team.api.get(f"{team.core}/pods")["metadata"]["resourceVersion"]
    return version


def restart(controller: ControllerProcess) -> None:
    controller.kill()
    controller.start()


def test_a_controller_killed_in_any_phase_creates_nothing_twice(
    controller: ControllerProcess, team: Team
) -> None:
    version = present_version(team)
    team.submit("run", volumes=WORKSPACE)
    restart(controller)
    team.has(f"{team.core}/persistentvolumeclaims/run-workspace")
    restart(controller)
    team.has(f"{team.core}/pods/run-sync-0")
    restart(controller)
    team.reaches("run", "Syncing")
    restart(controller)
    team.pod_becomes("run-sync-0", "Succeeded")
    restart(controller)
    team.has(f"{team.batch}/jobs/run")
    restart(controller)
    team.reaches("run", "Queued")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    restart(controller)
    team.reaches("run", "Running")
    restart(controller)
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Succeeded")
    restart(controller)
    team.reaches("run", "Succeeded")
    pods = births(team, f"{team.core}/pods", version)
    assert pods.pop("run-sync-0") == 1
    assert sorted(pods) == team.workers("run"), "two workers, no second gang, no second sync pod"
    assert births(team, f"{team.batch}/jobs", version) == {"run": 1}
    assert births(team, f"{team.core}/services", version) == {"run": 1}


def test_a_controller_killed_between_writes_creates_nothing_twice(
    controller: ControllerProcess, team: Team
) -> None:
    version = present_version(team)
    names = [f"run-{number}" for number in range(20)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(team.submit, names))
    for _ in range(3):
        made = random.randint(1, len(names) - 1)
        eventually(f"{made} Jobs", lambda: len(team.api.items(f"{team.batch}/jobs")) >= made)  # noqa: B023
        restart(controller)
    for name in names:
        team.reaches(name, "Queued")
    assert births(team, f"{team.batch}/jobs", version) == dict.fromkeys(names, 1)
    assert births(team, f"{team.core}/services", version) == dict.fromkeys(names, 1)


def test_a_restart_with_compaction_causes_one_relist(
    cluster: LocalCluster, controller: ControllerProcess, team: Team
) -> None:
    team.submit("run")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    team.reaches("run", "Running")
    cluster.compact_etcd()
    cluster.restart("kube-apiserver")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Succeeded")
    team.reaches("run", "Succeeded")
    # An API server that is not ready refuses with other reasons.
    gone = [line for line in controller.lines() if line.get("reason") == "Expired"]
    relists = Counter(line["resource"] for line in gone)
    assert relists, "the history was compacted"
    # PVCs of jobs and PVCs of queues have two watches.
    watches = {"persistentvolumeclaims": 2}
    assert all(count <= watches.get(resource, 1) for resource, count in relists.items()), relists


def test_the_controller_waits_for_its_crds_and_is_not_ready(tmp_path: Path) -> None:
    name = f"test-no-crds-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE) as cluster:
        process = ControllerProcess(cluster, tmp_path, *NO_ELECTION)
        with process.running():
            site = f"http://127.0.0.1:{process.wait_for_line('serving')['port']}"

            def unready() -> str:
                answer = httpx.get(f"{site}/readyz", timeout=60)
                text = answer.text if answer.status_code == 503 else ""
                return text if text.count("install the CustomResourceDefinition") == 2 else ""

            body = eventually("readyz names what is missing", unready)
            assert "torchrunjobs.torchrun.ai" in body
            assert "torchrunqueues.torchrun.ai" in body
            assert httpx.get(f"{site}/healthz", timeout=60).status_code == 200
            logged = {
                line["resource"]: line.get("error", "")
                for line in process.lines()
                if "resource" in line
            }
            for kind in ("torchrunjobs.torchrun.ai", "torchrunqueues.torchrun.ai"):
                assert f"install the CustomResourceDefinition of {kind}" in logged[kind]
            install_crds(cluster)
            eventually("ready", lambda: httpx.get(f"{site}/readyz", timeout=60).status_code == 200)


def test_a_lost_lease_ends_the_process_at_once(
    cluster: LocalCluster, api: Api, tmp_path: Path
) -> None:
    lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/torchrun-controller"
    process = ControllerProcess(cluster, tmp_path)
    with process.running():
        process.wait_for_line("controllers started")
        api.patch(lease, {"spec": {"holderIdentity": "a-rival"}})
        assert process.wait() == 1
    assert api.get(lease)["spec"]["holderIdentity"] == "a-rival", "a lost lease is not released"
    api.delete(lease)


def test_a_released_lease_is_acquired_at_once(
    cluster: LocalCluster, team: Team, tmp_path: Path
) -> None:
    (tmp_path / "standby").mkdir()
    leader = ControllerProcess(cluster, tmp_path)
    standby = ControllerProcess(cluster, tmp_path / "standby")
    with leader.running():
        leader.wait_for_line("controllers started")
        with standby.running():
            standby.wait_for_line("the lease has a holder")
            leader.send(signal.SIGTERM)
            assert leader.wait() == 0
            standby.wait_for_line("controllers started")
            team.submit("run")
            team.reaches("run", "Queued")


def test_a_second_signal_ends_the_process_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    process = ControllerProcess(cluster, tmp_path, *NO_ELECTION)
    process.start()
    process.wait_for_line("controllers started")
    cluster.stop("kube-apiserver")  # so a clean shutdown would wait for a write
    try:
        process.send(signal.SIGTERM)
        process.send(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        cluster.start("kube-apiserver")


def test_an_idle_controller_writes_nothing(
    cluster: LocalCluster, team: Team, audit: AuditLog, tmp_path: Path
) -> None:
    """A thousand finished jobs and one running job cause no write after the start."""
    first = ControllerProcess(cluster, tmp_path, *NO_ELECTION)
    with first.running():
        team.submit("running")
        for pod in team.workers("running"):
            team.pod_becomes(pod, "Running")
        team.reaches("running", "Running")
        queue = f"{team.group}/torchrunqueues/research"
        eventually(
            "its queue counts it", lambda: team.api.get(queue)["status"]["jobs"]["running"] == 1
        )
    cluster.stop("kube-controller-manager")
    try:
        _make_finished(team, FINISHED_JOBS)
        rest = audit.size()
        second = ControllerProcess(cluster, tmp_path, "--lease-namespace", team.name)
        with second.running():
            site = f"http://127.0.0.1:{second.wait_for_line('serving')['port']}"
            second.wait_for_line("controllers started")
            eventually("every job was looked at", lambda: _reconciles(site) > FINISHED_JOBS)
            signal.sigtimedwait([], SILENCE_SECONDS)
            writes = [w for w in audit.writes(rest) if w.resource != "leases"]
        assert writes == []
    finally:
        cluster.start("kube-controller-manager")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kinds_without_changes_since_an_api_server_restart_get_bookmarks(
    cluster: LocalCluster, team: Team, tmp_path: Path
) -> None:
    """The API server sends their bookmarks only after the watch is opened again."""
    controller = ControllerProcess(cluster, tmp_path, *NO_ELECTION)
    with controller.running():
        site = f"http://127.0.0.1:{controller.wait_for_line('serving')['port']}"
        controller.wait_for_line("controllers started")
        cluster.restart("kube-apiserver")
        oldest = 0.0
        for _ in range(170):
            signal.sigtimedwait([], 1)
            oldest = max(oldest, *_values(site, "torchrun_watch_age_seconds{"))
        assert _values(site, 'torchrun_watch_restarts_total{cause="Silent"'), (
            "all kinds were active"
        )
    assert 80 < oldest < 120


def _reconciles(site: str) -> float:
    return sum(_values(site, "torchrun_reconcile_total{"))


def _values(site: str, series: str) -> list[float]:
    lines = httpx.get(f"{site}/metrics", timeout=60).text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(series)]


def _make_finished(team: Team, count: int) -> None:
    team.submit("example")
    body = team.api.get(f"{team.group}/torchrunjobs/example")["spec"]
    now = "2026-01-01T00:00:00Z"
    done = {"type": "Complete", "status": "True", "reason": "Completed", "message": "done"}
    status = {
        "phase": "Succeeded",
        "observedGeneration": 1,
        "numNodes": 2,
        "reason": "Completed",
        "message": "2 of 2 pods succeeded.",
        "conditions": [{**done, "lastTransitionTime": now, "observedGeneration": 1}],
        "startTime": now,
        "completionTime": now,
    }

    def make(number: int) -> None:
        name = f"done-{number}"
        owner = team.submit(name, **body)["metadata"]["uid"]
        team.api.patch(f"{team.group}/torchrunjobs/{name}/status", {"status": status})
        team.api.create(f"{team.batch}/jobs", _child_job(name, owner))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(count)))
    team.api.delete(f"{team.group}/torchrunjobs/example")


def _child_job(name: str, owner: str) -> dict[str, Any]:
    reference = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "name": name,
        "uid": owner,
        "controller": True,
    }
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "trainer:1"}]}
    return {
        "metadata": {
            "name": name,
            "labels": {"torchrun-job-name": name, "torchrun.ai/attempt": "0"},
            "ownerReferences": [reference],
        },
        "spec": {"completions": 2, "parallelism": 2, "template": {"spec": pod}},
    }
