"""Gangs under the real kube-scheduler, and under simulated schedulers with the kinds of real ones.

Gang scheduling of Kubernetes is enabled, so it is the default here. Nodes and containers are
kwok's. played_schedulers binds the gangs of KAI and coscheduling.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from integration.controller_process import Api, ControllerProcess, eventually, install_crds
from integration.kwok import playing
from integration.native_gangs import GROUP, NATIVE, NativeRelease
from integration.played_schedulers import Scheduler
from integration.scheduler_kinds import COSCHEDULING_GROUPS, KAI_GROUPS, install
from integration.team import Team
from torchrun_api.names import ATTEMPT_LABEL
from torchrun_cluster import LocalCluster, Size
from torchrun_cluster.binaries import wanted_kubernetes

SIZE = 4  # nodes, each with room for one worker
NODES = [f"node-{number}" for number in range(SIZE)]
RELEASE = wanted_kubernetes()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    native = NATIVE.get(RELEASE)
    with LocalCluster(
        name=f"test-gangs-{os.getpid()}",
        size=Size.CONTROL_PLANE,
        scheduler=True,
        extra_args=native and native.flags(*native.alpha_gates),
    ) as running:
        install_crds(running)
        yield running


@pytest.fixture(scope="module", autouse=True)
def _kwok(cluster: LocalCluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for name in NODES:
        api.create("/api/v1/nodes", {"metadata": {"name": name}})
    with playing(cluster, tmp_path_factory.mktemp("kwok"), "--manage-all-nodes"):
        yield


def pods(team: Team, job: str) -> list[Any]:
    return team.api.items(f"{team.core}/pods", f"torchrun-job-name={job}")


def placed(team: Team, job: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods(team, job) if pod["spec"].get("nodeName")]


def groups(team: Team, path: str) -> list[str]:
    items = team.api.items(f"/apis/{path}".replace("NS", team.name))
    return sorted(item["metadata"]["name"] for item in items)


def end(team: Team, job: str) -> None:
    """Delete a job, and wait until its pods have released their nodes."""
    team.api.delete(f"{team.group}/torchrunjobs/{job}")
    eventually(f"{job} is gone", lambda: not pods(team, job))


# Gang scheduling of Kubernetes

native = pytest.mark.skipif(
    RELEASE not in NATIVE, reason=f"Kubernetes {RELEASE} schedules no gangs itself"
)


@pytest.fixture
def release() -> NativeRelease:
    """The gang scheduling of the running Kubernetes."""
    return NATIVE[RELEASE]


def native_groups(team: Team, release: NativeRelease) -> list[str]:
    return sorted(item["metadata"]["name"] for item in team.api.items(release.path(team.name)))


@native
def test_a_gang_that_fits_runs(
    controller: ControllerProcess, team: Team, release: NativeRelease
) -> None:
    team.submit("fits", numNodes=SIZE)
    team.reaches("fits", "Running")
    spec = team.api.get(f"{release.path(team.name)}/fits")["spec"]
    of_pods = [pod["spec"] for pod in pods(team, "fits")]
    gang = {"gang": {"minCount": SIZE}}
    if release.kind == "Workload":
        assert spec["podGroups"][0]["policy"] == gang
        assert all(pod["workloadRef"]["name"] == "fits" for pod in of_pods)
    else:
        assert spec["schedulingPolicy"] == gang
        assert all(pod["schedulingGroup"]["podGroupName"] == "fits" for pod in of_pods)
    child = team.api.get(f"{team.batch}/jobs/fits")
    assert child["metadata"]["annotations"]["torchrun.ai/gang"] == "native"
    team.api.patch(f"{team.group}/torchrunjobs/fits", {"spec": {"suspend": True}})
    team.reaches("fits", "Suspended")
    eventually("its group is gone", lambda: not native_groups(team, release))
    end(team, "fits")


@native
def test_a_gang_that_does_not_fit_starts_no_pod(controller: ControllerProcess, team: Team) -> None:
    team.submit("large", numNodes=SIZE + 1)
    status = team.reaches("large", "Queued", "Unschedulable")
    assert f"0 of {SIZE + 1} pods are scheduled" in status["message"]
    assert not placed(team, "large")
    # One worker more does not fit, so none of the gang is bound.
    team.submit("small", numNodes=1)
    eventually("the worker of small", lambda: len(pods(team, "small")) == 1)
    end(team, "large")
    team.reaches("small", "Running")
    end(team, "small")


@native
def test_a_second_gang_waits_for_the_end_of_the_first(
    controller: ControllerProcess, team: Team
) -> None:
    team.submit("first", numNodes=SIZE - 1)
    team.reaches("first", "Running")
    team.submit("second", numNodes=SIZE - 1)
    team.reaches("second", "Queued", "Unschedulable")
    assert not placed(team, "second")
    end(team, "first")
    team.reaches("second", "Running")
    end(team, "second")


@native
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_concurrent_gangs_with_room_for_one_both_finish(
    controller: ControllerProcess, team: Team
) -> None:
    for job in ("one", "two"):
        team.submit(job, numNodes=SIZE - 1)

    def running() -> str:
        phases = {team.status(job).get("phase"): job for job in ("one", "two")}
        return phases.get("Running", "")

    # If their pods alternate in the scheduler's queue, it gives both up after 5 minutes and tries
    # again, possibly in the same order. Either gang may run first.
    first = eventually("one of them runs", running, 1200)
    second = {"one": "two", "two": "one"}[first]
    team.reaches(second, "Queued", "Unschedulable")
    assert not placed(team, second)
    end(team, first)
    team.reaches(second, "Running")
    end(team, second)


pod_groups = pytest.mark.skipif(
    not (RELEASE in NATIVE and NATIVE[RELEASE].alpha_gates),
    reason=f"Kubernetes {RELEASE} has no PodGroups",
)


@pod_groups
def test_the_job_controller_leaves_our_gangs_alone(
    controller: ControllerProcess, team: Team, release: NativeRelease
) -> None:
    """With WorkloadWithJob it makes a Workload and a PodGroup, but not for Jobs with an owner."""
    team.submit("gang", numNodes=2)
    team.reaches("gang", "Running")
    with_gang(team, "none")
    team.submit("plain", numNodes=2)
    team.reaches("plain", "Running")
    container = {"name": "c", "image": "none", "resources": {"requests": {"cpu": "1"}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec = {"parallelism": 2, "completions": 2, "completionMode": "Indexed", "template": template}
    team.api.create(f"{team.batch}/jobs", {"metadata": {"name": "other"}, "spec": spec})

    def owners(plural: str) -> set[tuple[str, str]]:
        path = f"/apis/{GROUP}/{release.version}/namespaces/{team.name}/{plural}"
        items = [item["metadata"]["ownerReferences"] for item in team.api.items(path)]
        return {(owner["kind"], owner["name"]) for (owner, *_) in items}

    eventually("a group of the other Job", lambda: ("Job", "other") in owners("podgroups"))
    # In 1.36 it does not look at the owner, only at the group in the pod template.
    jobs = {("Job", "other"), *([("Job", "plain")] if RELEASE == "1.36" else [])}
    assert owners("workloads") == jobs
    assert owners("podgroups") == jobs | {("TorchrunJob", "gang")}
    team.api.delete(f"{team.batch}/jobs/other?propagationPolicy=Background")
    for job in ("gang", "plain"):
        end(team, job)


# Priority and topology

beta = pytest.mark.skipif(
    not (RELEASE in NATIVE and NATIVE[RELEASE].version == "v1beta1"),
    reason=f"PodGroups of Kubernetes {RELEASE} have no priority",
)


@beta
def test_a_gang_of_higher_priority_takes_the_place_of_another(
    controller: ControllerProcess, team: Team, release: NativeRelease
) -> None:
    name = f"high-{team.name}"
    priority_class = {"metadata": {"name": name}, "value": 1000}
    team.api.create(f"/apis/{GROUP}/v1/priorityclasses", priority_class)
    team.submit("usual", numNodes=SIZE)
    team.reaches("usual", "Running")
    team.submit("urgent", numNodes=2, scheduling={"priorityClassName": name})
    team.reaches("urgent", "Running")
    group = team.api.get(f"{release.path(team.name)}/urgent")
    assert group["spec"]["priority"] == 1000
    status = team.reaches("usual", "Queued", "Unschedulable")
    assert (status.get("restarts", 0), status["disruptions"]) == (0, 1)
    following = [
        pod for pod in pods(team, "usual") if pod["metadata"]["labels"][ATTEMPT_LABEL] == "1"
    ]
    assert not [pod for pod in following if pod["spec"].get("nodeName")]
    end(team, "urgent")
    team.reaches("usual", "Running")
    end(team, "usual")


@pod_groups
def test_a_gang_is_placed_in_a_zone_with_room_for_all(
    controller: ControllerProcess, team: Team
) -> None:
    zones = dict(zip(NODES, ("small", "large", "large", "large"), strict=True))
    for node, zone in zones.items():
        team.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"zone": zone}}})
    with_gang(team, "native", topology={"required": "zone"})
    for number in range(4):
        team.submit(f"near-{number}", numNodes=3)
        team.reaches(f"near-{number}", "Running")
        nodes = {pod["spec"]["nodeName"] for pod in pods(team, f"near-{number}")}
        assert {zones[node] for node in nodes} == {"large"}
        end(team, f"near-{number}")


# Simulated KAI and coscheduling

KAI = "scheduling.run.ai/v2alpha2/namespaces/NS/podgroups"
COSCHEDULING = "scheduling.x-k8s.io/v1alpha1/namespaces/NS/podgroups"


def with_gang(team: Team, gang: str, **scheduling: object) -> None:
    spec = {"spec": {"scheduling": {"gang": gang, **scheduling}}}
    team.api.patch(f"{team.group}/torchrunqueues/research", spec)


def test_kai(controller: ControllerProcess, cluster: LocalCluster, team: Team) -> None:
    with_gang(team, "kai", topology={"required": "rack", "name": "racks"})
    team.submit("run", numNodes=2)
    status = team.reaches("run", "Pending", "GangSchedulerMissing")
    assert "Install KAI" in status["message"]
    install(cluster, KAI_GROUPS)
    team.workers("run")  # it is discovered without a restart
    kai = Scheduler(team, "kai-scheduler", KAI, ("annotations", "pod-group-name"), NODES)
    group = team.api.get(f"{kai.path}/run")
    assert group["spec"]["topologyConstraint"] == {
        "topology": "racks",
        "requiredTopologyLevel": "rack",
    }
    kai.until("run", "Running")
    team.submit("large", numNodes=SIZE + 1)
    status = kai.until("large", "Queued", "GangUnschedulable")
    assert (
        status["message"]
        == f"PodGroup large: {SIZE + 1} pods need {SIZE + 1} nodes, there are {SIZE}."
    )
    assert not placed(team, "large")
    end(team, "large")
    eventually("its PodGroup goes with it", lambda: groups(team, KAI) == ["run"])
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Succeeded")
    team.reaches("run", "Succeeded")
    eventually("the PodGroup goes with the gang", lambda: not groups(team, KAI))
    cluster.kubectl("delete", "crd", "podgroups.scheduling.run.ai", timeout=180)
    team.submit("late", numNodes=2)
    team.reaches("late", "Pending", "GangSchedulerMissing")


def test_coscheduling(controller: ControllerProcess, cluster: LocalCluster, team: Team) -> None:
    install(cluster, COSCHEDULING_GROUPS)
    with_gang(team, "coscheduling")
    team.submit("run", numNodes=2, reliability={"maxRestarts": 1})
    scheduler = Scheduler(
        team,
        "scheduler-plugins-scheduler",
        COSCHEDULING,
        ("labels", "scheduling.x-k8s.io/pod-group"),
        NODES,
    )
    scheduler.until("run", "Running")
    group = team.api.get(f"{scheduler.path}/run")
    assert group["spec"] == {"minMember": 2}
    first, *_ = team.workers("run")
    team.pod_becomes(first, "Failed", "ValueError")
    eventually("the next attempt's group", lambda: "run-r1" in groups(team, COSCHEDULING))
    scheduler.until("run", "Running")
    eventually("one group an attempt", lambda: groups(team, COSCHEDULING) == ["run-r1"])
    end(team, "run")
    eventually("the PodGroup goes with the job", lambda: not groups(team, COSCHEDULING))
