"""Queues on a real API server: status, KAI queues and deletion."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from integration.controller_process import NO_ELECTION, Api, ControllerProcess, eventually
from integration.scheduler_kinds import KAI_QUEUES, install
from integration.team import Team
from torchrun_cluster import LocalCluster, Size

KAI = "/apis/scheduling.run.ai/v2/queues"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    name = f"test-queues-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE) as running:
        yield running


@pytest.fixture(scope="module")
def controller(
    crds: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControllerProcess]:
    folder = tmp_path_factory.mktemp("controller")
    with ControllerProcess(crds, folder, *NO_ELECTION).running() as process:
        yield process


@pytest.fixture
def team(api: Api, controller: ControllerProcess) -> Team:
    """Without a queue yet."""
    return Team(api)


def path(team: Team, name: str = "research") -> str:
    return f"{team.group}/torchrunqueues/{name}"


def queue(team: Team) -> Any:
    return team.api.get(path(team))


def condition(team: Team, kind: str) -> dict[str, Any]:
    status = (queue(team) or {}).get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def becomes(team: Team, kind: str, reason: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = condition(team, kind)
        return found if found.get("reason") == reason else None

    return eventually(f"{kind} {reason}: {queue(team)}", look)


def edit(team: Team, **spec: object) -> None:
    team.api.patch(path(team), {"spec": spec})


def events(team: Team, reason: str) -> list[Any]:
    found = team.api.items(f"/apis/events.k8s.io/v1/namespaces/{team.name}/events")
    return [e for e in found if e["regarding"]["kind"] == "TorchrunQueue" and e["reason"] == reason]


def test_the_status_of_a_queue(cluster: LocalCluster, team: Team) -> None:
    # Without a weight, because admission would need nodes.
    team.make_queue()
    becomes(team, "Ready", "Ready")
    assert condition(team, "TemplateValid")["status"] == "True"
    assert queue(team)["metadata"]["finalizers"] == ["torchrun.ai/queue"]
    team.submit("run")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    eventually("a running job", lambda: queue(team)["status"]["jobs"]["running"] == 1)
    head, line = cluster.kubectl("get", "trq", "-n", team.name).stdout.splitlines()
    counts = ["PENDING", "STARTING", "RUNNING"]
    assert head.split() == ["NAME", "WEIGHT", "QUOTA", *counts, "PHASE", "AGE"]
    shown = line.split()
    assert (shown[0], shown[-5:-1]) == ("research", ["0", "0", "1", "Active"])


def test_an_idle_queue_is_not_written(team: Team) -> None:
    team.make_queue()
    becomes(team, "Ready", "Ready")
    before = queue(team)["metadata"]["resourceVersion"]
    # Another queue is active meanwhile.
    neighbour = Team(team.api)
    neighbour.make_queue()
    becomes(neighbour, "Ready", "Ready")
    time.sleep(2)  # the test is that nothing is written
    assert queue(team)["metadata"]["resourceVersion"] == before


def test_a_misspelt_template_is_reported_before_the_first_job(team: Team) -> None:
    team.make_queue(podTemplate={"spec": {"terminationGracePeriodSecond": 5}})
    found = becomes(team, "TemplateValid", "Rejected")
    assert "terminationGracePeriodSecond" in found["message"]
    assert queue(team)["status"]["phase"] == "Updating"
    eventually("an event", lambda: events(team, "Rejected"))
    assert team.api.items(f"{team.batch}/jobs") == [], "a dry run creates nothing"
    edit(team, podTemplate={"spec": {"terminationGracePeriodSecond": None}})
    becomes(team, "TemplateValid", "Accepted")
    becomes(team, "Ready", "Ready")


def test_a_change_applies_to_later_jobs(team: Team) -> None:
    team.make_queue()
    becomes(team, "Ready", "Ready")
    team.submit("run")
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    team.reaches("run", "Running")
    eventually("it is counted", lambda: queue(team)["status"]["jobs"]["running"] == 1)
    edit(team, image="trainer:2")
    (event,) = eventually("an event", lambda: events(team, "QueueChanged"))
    assert "Running jobs that keep the previous spec: 1." in event["note"]
    job = team.api.get(f"{team.batch}/jobs/run")
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "trainer:1"


class TestTheEnd:
    """The deletion of a queue waits for its running jobs."""

    def test_deletion_waits_for_running_jobs(self, team: Team) -> None:
        team.make_queue()
        becomes(team, "Ready", "Ready")
        team.submit("run")
        for pod in team.workers("run"):
            team.pod_becomes(pod, "Running")
        team.reaches("run", "Running")
        team.api.delete(path(team))
        found = becomes(team, "Ready", "Terminating")
        assert "run" in found["message"]
        assert queue(team)["status"]["phase"] == "Terminating"
        team.submit("late")
        team.reaches("late", "Pending", "QueueTerminating")
        for pod in team.workers("run"):
            team.pod_becomes(pod, "Succeeded")
        eventually("it goes", lambda: queue(team) is None)
        team.reaches("late", "Pending", "QueueNotFound")
        team.make_queue()
        team.reaches("late", "Queued")

    def test_an_unused_queue_is_deleted_at_once(self, team: Team) -> None:
        team.make_queue(nodeResources={"gpus": 8})
        becomes(team, "Ready", "Ready")
        team.submit("never", numNodes=None, numGPUs=9)
        team.reaches("never", "Pending", "InvalidSpec")
        team.api.delete(path(team))
        eventually("it goes", lambda: queue(team) is None)

    def test_a_queue_whose_finalizer_others_own_is_deleted(self, team: Team) -> None:
        """As after kubectl create of what kubectl get -o yaml has written."""
        team.make_queue()
        becomes(team, "Ready", "Ready")
        copied = queue(team)
        meta = {"name": "copy", "finalizers": copied["metadata"]["finalizers"]}
        copy = f"{team.group}/torchrunqueues/copy"
        team.api.create(copy.removesuffix("/copy"), {**copied, "metadata": meta})
        eventually("it is known", lambda: team.api.get(copy).get("status", {}).get("phase"))
        team.api.delete(copy)
        eventually("it goes", lambda: team.api.get(copy) is None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"quota": {"gpus": -1}}, "should be greater than or equal to 0"),
        ({"quota": {"memory": "much"}}, "should match"),
        ({"quota": {"cpu": "-1"}}, "should match"),
        ({"weight": -1}, "should be greater than or equal to 0"),
    ],
)
def test_invalid_fields_are_refused_by_the_server(
    team: Team, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError) as refused:
        team.make_queue(**spec)
    assert message in str(refused.value)


class TestKai:
    """The order matters: first without KAI, then with it."""

    def test_an_installation_is_noticed(self, cluster: LocalCluster, team: Team) -> None:
        name = f"{team.name}-training"
        team.make_queue(kaiQueue=name, quota={"gpus": 16, "memory": "1Gi"}, weight=2)
        becomes(team, "KaiQueueReady", "KaiNotInstalled")
        assert queue(team)["status"]["phase"] == "Active"
        install(cluster, KAI_QUEUES)
        becomes(team, "KaiQueueReady", "ParentNotFound")
        self.make(team.api, "default-parent-queue")
        assert "--kai-quota-namespaces" in becomes(team, "KaiQueueReady", "NotAllowed")["message"]
        kai_queue = team.has(f"{KAI}/{name}")
        assert kai_queue["metadata"]["annotations"]["torchrun.ai/queue"] == f"{team.name}/research"
        assert kai_queue["spec"]["parentQueue"] == "default-parent-queue"
        gpu = {"quota": 0, "limit": 16, "overQuotaWeight": 1}
        assert kai_queue["spec"]["resources"]["gpu"] == gpu
        assert kai_queue["spec"]["resources"]["memory"]["limit"] == 1074
        assert kai_queue["spec"]["resources"]["cpu"]["limit"] == -1

    def test_the_kai_queue_is_updated_deleted_and_recreated(self, team: Team) -> None:
        first, second = f"{team.name}-a", f"{team.name}-b"
        team.make_queue(kaiQueue=first, quota={"gpus": 4})
        becomes(team, "KaiQueueReady", "NotAllowed")
        edit(team, quota={"gpus": 8})
        eventually("8", lambda: self.gpu_limit(team.api, first) == 8)
        resources = {"gpu": {"limit": 99}}
        team.api.patch(f"{KAI}/{first}", {"spec": {"resources": resources}})
        eventually("8 again", lambda: self.gpu_limit(team.api, first) == 8)
        edit(team, kaiQueue=second)
        eventually("the second", lambda: self.gpu_limit(team.api, second) == 8)
        eventually("the first goes", lambda: team.api.get(f"{KAI}/{first}") is None)
        team.api.delete(path(team))
        eventually("the queue goes", lambda: queue(team) is None)
        assert team.api.get(f"{KAI}/{second}") is None

    def test_two_namespaces_one_kai_queue(self, team: Team) -> None:
        name = f"{team.name}-shared"
        team.make_queue(kaiQueue=name, quota={"gpus": 4})
        becomes(team, "KaiQueueReady", "NotAllowed")
        time.sleep(1.1)  # creation times have whole seconds
        younger = Team(team.api)
        younger.make_queue(kaiQueue=name, quota={"gpus": 400})
        found = becomes(younger, "KaiQueueReady", "Conflict")
        assert f"{team.name}/research" in found["message"]
        assert self.gpu_limit(team.api, name) == 4
        assert condition(team, "KaiQueueReady")["reason"] == "NotAllowed"
        uid = team.api.get(f"{KAI}/{name}")["metadata"]["uid"]
        team.api.delete(path(team))
        becomes(younger, "KaiQueueReady", "NotAllowed")
        eventually("taken over", lambda: self.gpu_limit(team.api, name) == 400)
        assert team.api.get(f"{KAI}/{name}")["metadata"]["uid"] == uid

    def test_a_kai_queue_of_another_owner_is_used_unchanged(self, team: Team) -> None:
        name = f"{team.name}-theirs"
        self.make(team.api, name)
        before = team.api.get(f"{KAI}/{name}")["metadata"]["resourceVersion"]
        team.make_queue(kaiQueue=name, quota={"gpus": 4})
        becomes(team, "KaiQueueReady", "NotManaged")
        team.api.delete(path(team))
        eventually("the queue goes", lambda: queue(team) is None)
        assert team.api.get(f"{KAI}/{name}")["metadata"]["resourceVersion"] == before

    @staticmethod
    def make(api: Api, name: str) -> None:
        body = {
            "apiVersion": "scheduling.run.ai/v2",
            "kind": "Queue",
            "metadata": {"name": name},
            "spec": {"resources": {"gpu": {"quota": -1, "limit": -1}}},
        }
        api.create(KAI, body)

    @staticmethod
    def gpu_limit(api: Api, name: str) -> Any:
        kai_queue = api.get(f"{KAI}/{name}")
        return kai_queue and kai_queue["spec"]["resources"]["gpu"]["limit"]
