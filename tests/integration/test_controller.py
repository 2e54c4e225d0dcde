"""The controller process against a real API server, from a user's objects to their status.

There is no kubelet: the tests set the status of pods. The real controller-manager creates them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.controller_process import (
    NO_ELECTION,
    Api,
    ControllerProcess,
    eventually,
    install_crds,
)
from integration.team import WORKSPACE, Team
from torchrun_cluster import LocalCluster, Size


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    name = f"test-controller-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE) as running:
        install_crds(running)
        yield running


@pytest.fixture
def team(api: Api) -> Team:
    """A team without a queue."""
    return Team(api)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in status["conditions"] if c["type"] == kind)
    return found


def test_the_life_of_a_run(controller: ControllerProcess, team: Team) -> None:
    team.make_queue()
    team.submit("run", volumes=WORKSPACE)
    team.reaches("run", "Syncing")
    assert team.children("jobs", "run") == [], "no worker before the code is there"
    team.has(f"{team.core}/pods/run-sync-0")
    team.pod_becomes("run-sync-0", "Running")
    team.reaches("run", "Syncing", "WaitingForUpload")
    team.pod_becomes("run-sync-0", "Succeeded")
    team.reaches("run", "Queued")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    running = team.reaches("run", "Running")
    assert running.get("attempt", 0) == 0
    assert running["numNodes"] == 2
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Succeeded")
    succeeded = team.reaches("run", "Succeeded")
    assert condition(succeeded, "Complete")["status"] == "True"
    assert succeeded["completionTime"]
    assert team.children("persistentvolumeclaims", "run") == ["run-workspace"]
    assert team.children("services", "run") == ["run"]


def test_the_root_cause_of_a_failure_is_in_the_status(
    controller: ControllerProcess, team: Team
) -> None:
    team.make_queue()
    team.submit("run", reliability={"maxRestarts": 0})
    first, second = team.workers("run")
    team.pod_becomes(second, "Running")
    message = '{"rank": 3, "exitCode": 1, "reason": "Exception", "message": "ValueError: no data"}'
    team.pod_becomes(first, "Failed", message)
    failed = team.reaches("run", "Failed")
    assert failed["lastFailure"]["rank"] == 3
    assert "ValueError: no data" in failed["message"]
    events = eventually(
        "an event of the failure",
        lambda: [
            event
            for event in team.api.items(f"/apis/events.k8s.io/v1/namespaces/{team.name}/events")
            if event["regarding"]["kind"] == "TorchrunJob" and event["type"] == "Warning"
        ],
    )
    assert "ValueError: no data" in events[0]["note"]
    assert events[0]["reportingController"] == "torchrun.ai/controller"


def test_a_job_starts_when_its_queue_is_created(controller: ControllerProcess, team: Team) -> None:
    team.submit("run")
    assert "research" in team.reaches("run", "Pending", "QueueNotFound")["message"]
    team.make_queue()
    team.reaches("run", "Queued")
    team.has(f"{team.batch}/jobs/run")


def test_a_refused_template_is_reported_and_can_be_fixed(
    controller: ControllerProcess, team: Team
) -> None:
    team.make_queue(podTemplate={"spec": {"terminationGracePeriodSecond": 5}})
    team.submit("run")
    status = team.reaches("run", "Pending", "Rejected")
    assert "terminationGracePeriodSecond" in status["message"]
    right = {"spec": {"podTemplate": {"spec": {"terminationGracePeriodSecond": None}}}}
    team.api.patch(f"{team.group}/torchrunqueues/research", right)
    team.reaches("run", "Queued")
    team.has(f"{team.batch}/jobs/run")


def test_a_failed_webhook_for_jobs_does_not_hide_a_failure(
    controller: ControllerProcess, team: Team
) -> None:
    """The API server answers 500 to new Jobs. The status shows the failure and the webhook."""
    team.make_queue()
    team.submit("run", reliability={"maxRestarts": 1, "backoffSeconds": 1})
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    team.reaches("run", "Running")
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    rule = {"operations": ["CREATE"], "apiGroups": ["batch"], "apiVersions": ["v1"]}
    hook = {
        "name": "jobs.policies.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team.name}},
        "clientConfig": {"service": {"namespace": team.name, "name": "policies"}},
        "rules": [{**rule, "resources": ["jobs"]}],
    }
    team.api.create(hooks, {"metadata": {"name": team.name}, "webhooks": [hook]})
    try:
        eventually("the webhook is in force", lambda: webhook_fails(team))
        team.pod_becomes(team.workers("run")[0], "Failed")
        status = team.reaches("run", "Pending", "Rejected")
        assert 'failed calling webhook "jobs.policies.example.com"' in status["message"]
        assert [attempt["counted"] for attempt in status["attempts"]] == [True]
    finally:
        team.api.delete(f"{hooks}/{team.name}")
    eventually("the webhook is gone", lambda: not webhook_fails(team))
    # An edit lets the controller retry at once, and not after a minute.
    team.api.patch(f"{team.group}/torchrunjobs/run", {"spec": {"reliability": {"maxRestarts": 2}}})
    team.has(f"{team.batch}/jobs/run-r1")
    team.reaches("run", "Queued")


def webhook_fails(team: Team) -> bool:
    """Whether the API server refuses a new Job, in a dry run."""
    container = {"name": "c", "image": "i"}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    body = {"metadata": {"name": "trial"}, "spec": {"template": template}}
    answer = team.api.client.post(f"{team.batch}/jobs?dryRun=All", json=body)
    return answer.status_code == 500 and "failed calling webhook" in answer.text


def test_an_object_of_another_owner_with_our_name_is_reported_and_left_alone(
    controller: ControllerProcess, team: Team
) -> None:
    team.make_queue()
    ports = [{"port": 80}]
    foreign = {"metadata": {"name": "run"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    before = team.api.create(f"{team.core}/services", foreign)
    team.submit("run")
    status = team.reaches("run", "Pending", "NameConflict")
    assert "Service 'run' already exists" in status["message"]
    for pod in team.workers("run"):  # they wait until their Service resolves them
        team.pod_becomes(pod, "Running")
    eventually("both run", lambda: team.status("run").get("workers", {}).get("running") == 2)
    team.reaches("run", "Pending", "NameConflict")
    assert team.api.get(f"{team.core}/services/run") == before
    team.api.delete(f"{team.core}/services/run")
    team.reaches("run", "Running")
    assert team.children("jobs", "run") == ["run"]


def test_a_name_can_be_used_again_at_once(controller: ControllerProcess, team: Team) -> None:
    team.make_queue()
    team.submit("run")
    first = team.has(f"{team.batch}/jobs/run")["metadata"]["uid"]
    team.workers("run")
    team.api.delete(f"{team.group}/torchrunjobs/run")
    team.submit("run")

    def renewed() -> bool:
        job = team.api.get(f"{team.batch}/jobs/run")
        return job is not None and job["metadata"]["uid"] != first

    eventually("a Job of the second run", renewed)
    team.reaches("run", "Queued")


def test_an_invalid_object_does_not_affect_others(
    cluster: LocalCluster, controller: ControllerProcess, team: Team
) -> None:
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/torchrunjobs.torchrun.ai"
    kept = team.api.get(crd)["spec"]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    # The scale subresource would still validate numNodes.
    open_to_all = {"schema": {"openAPIV3Schema": anything}, "subresources": {"status": {}}}
    loose = [{**kept["versions"][0], **open_to_all}]
    team.api.patch(crd, {"spec": {"versions": loose}})
    try:
        team.make_queue()
        # The API server serves the relaxed schema after a delay.
        eventually("an invalid job is taken", lambda: _submitted(team, "bad", numNodes="many"))
        team.submit("worse", env="PATH=/bin", volumes=[1, 2])
        team.submit("neither", numNodes=None)
        team.submit("good")
        team.has(f"{team.batch}/jobs/good")
        for name in ("bad", "worse", "neither"):
            status = team.reaches(name, "Pending", "InvalidSpec")
            assert "num" in status["message"] or "env" in status["message"]
        assert controller.is_running()
    finally:
        team.api.patch(crd, {"spec": {"versions": kept["versions"]}})


def _submitted(team: Team, name: str, **spec: object) -> bool:
    try:
        team.submit(name, **spec)
    except AssertionError:
        return False
    return True


def test_a_controller_of_one_namespace_ignores_others(
    cluster: LocalCluster, api: Api, tmp_path: Path
) -> None:
    ours, other = Team(api), Team(api)
    process = ControllerProcess(cluster, tmp_path, *NO_ELECTION, "--namespace", ours.name)
    with process.running():
        for team in (other, ours):
            team.make_queue()
            team.submit("run")
        ours.reaches("run", "Queued")
        ours.has(f"{ours.batch}/jobs/run")
        assert other.status("run") == {}


def test_dependent_jobs_run_in_order_and_a_cycle_can_be_fixed(
    controller: ControllerProcess, team: Team
) -> None:
    team.make_queue()
    team.submit("last", dependsOn=[{"name": "middle"}, {"name": "first"}])
    team.reaches("last", "Queued", "DependencyNotFound")
    team.submit("first", numNodes=1)
    team.submit("middle", numNodes=1, dependsOn=[{"name": "last"}])
    message = team.reaches("last", "Pending", "InvalidSpec")["message"]
    assert "last -> middle -> last" in message
    message = team.reaches("middle", "Pending", "InvalidSpec")["message"]
    assert "middle -> last -> middle" in message
    team.api.patch(f"{team.group}/torchrunjobs/middle", {"spec": {"dependsOn": None}})
    (pod,) = team.workers("middle", 1)
    team.pod_becomes(pod, "Running")
    team.pod_becomes(pod, "Succeeded")
    waits = team.reaches("last", "Queued", "WaitingForDependencies")["message"]
    assert "first to be Succeeded" in waits
    (pod,) = team.workers("first", 1)
    team.pod_becomes(pod, "Running")
    team.pod_becomes(pod, "Succeeded")
    team.workers("last")


def test_a_failed_job_fails_its_dependents(controller: ControllerProcess, team: Team) -> None:
    team.make_queue()
    team.submit("child", dependsOn=[{"name": "parent"}])
    team.submit("grandchild", dependsOn=[{"name": "child"}])
    team.submit("cleanup", numNodes=1, dependsOn=[{"name": "parent", "condition": "Finished"}])
    team.submit("parent", numNodes=1, reliability={"maxRestarts": 0})
    (pod,) = team.workers("parent", 1)
    team.pod_becomes(pod, "Running")
    team.pod_becomes(pod, "Failed", '{"rank": 0, "exitCode": 9, "message": "no data"}')
    assert "no data" in team.reaches("child", "Failed", "DependencyFailed")["message"]
    assert "child is Failed" in team.reaches("grandchild", "Failed", "DependencyFailed")["message"]
    team.workers("cleanup", 1)


def test_a_job_starts_without_uvloop(cluster: LocalCluster, team: Team, tmp_path: Path) -> None:
    team.make_queue()
    process = ControllerProcess(cluster, tmp_path, *NO_ELECTION, "--uvloop", "false")
    with process.running():
        team.submit("run")
        assert len(team.workers("run")) == 2
        team.reaches("run", "Queued")
