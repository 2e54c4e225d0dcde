"""The roles of the manifests grant exactly the permissions that the controller uses.

The audit log of the API server has each request of the controller's ServiceAccount.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import yaml

from integration import scheduler_kinds as kinds
from integration.controller_process import NO_ELECTION, Api, ControllerProcess, eventually
from integration.native_gangs import GROUP, NATIVE
from integration.rights import NAMESPACE, Audit, controller, denied, grant, used
from integration.team import WORKSPACE, Team
from integration.test_progress import Reporter, token
from roles import granted
from torchrun_cluster import LocalCluster, Size
from torchrun_cluster.binaries import wanted_kubernetes

ACCOUNT = "torchrun-controller"
MANIFESTS = Path(__file__).parents[2] / "manifests"
NATIVE_RELEASE = NATIVE.get(wanted_kubernetes())
# Without streamed lists, as in servers before 1.34, both list and watch are used.
GANG_GATE = ["GenericWorkload=true"] if NATIVE_RELEASE else []
GATES = "--feature-gates=" + ",".join(["WatchList=false", *GANG_GATE])
# From 1.36 on it lets PodGroups go that no pod uses any more.
MANAGER = [f"--feature-gates={gate}" for gate in GANG_GATE]
PROGRESS = ("--progress-url", "http://controller.test:8081", "--progress-port", "0")
LEASE = ("--lease-namespace", NAMESPACE)

Gang: TypeAlias = tuple[str, str, str, str, str, dict[str, Any]]
# gang, API group and version, plural, kind, minimal spec of another owner's group
PLAYED: tuple[Gang, ...] = (
    ("kai", "scheduling.run.ai", "v2alpha2", "podgroups", "PodGroup", {"minMember": 1}),
    ("volcano", "scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup", {}),
    ("coscheduling", "scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup", {"minMember": 1}),
)
GANGS: list[Gang] = [*PLAYED]
if NATIVE_RELEASE:
    kind_names = (NATIVE_RELEASE.version, NATIVE_RELEASE.plural, NATIVE_RELEASE.kind)
    GANGS.append(("native", GROUP, *kind_names, dict(NATIVE_RELEASE.basic)))

# Permissions that this test cannot exercise.
RARE = {
    # Used only if a KAI queue is created between the read and our write.
    ("get", "queues.scheduling.run.ai"),
    *(
        (verb, f"{other.plural}.{GROUP}")
        for verb in ("get", "list", "watch", "create", "patch", "delete")
        for other in NATIVE.values()
        if NATIVE_RELEASE is None or other.plural != NATIVE_RELEASE.plural
    ),
}


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return Audit(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def cluster(audit: Audit) -> Iterator[LocalCluster]:
    flags = [*audit.flags, GATES, *([NATIVE_RELEASE.serving] if NATIVE_RELEASE else [])]
    with LocalCluster(
        name=f"test-rights-{os.getpid()}",
        size=Size.CONTROL_PLANE,
        extra_args={"kube-apiserver": flags, "kube-controller-manager": MANAGER},
    ) as running:
        yield running


@pytest.fixture
def team(api: Api) -> Team:
    """A team without a queue."""
    return Team(api)


@pytest.fixture(scope="module", autouse=True)
def _kinds(crds: LocalCluster) -> None:
    kinds.install(
        crds,
        *(kinds.KAI_QUEUES, kinds.KAI_TOPOLOGIES, kinds.KAI_GROUPS),
        *(kinds.COSCHEDULING_GROUPS, kinds.VOLCANO_GROUPS, kinds.KUEUE_WORKLOADS),
    )


def condition(team: Team, kind: str) -> dict[str, Any]:
    queue = team.api.get(f"{team.group}/torchrunqueues/research") or {}
    conditions = queue.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] == kind), {})


def others(team: Team, path: str, kind: str, name: str, **spec: object) -> str:
    """Create an object of another owner with a name. Returns its path."""
    group, version = path.removeprefix("/apis/").split("/")[:2]
    api_version = "v1" if path.startswith("/api/v1") else f"{group}/{version}"
    body = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **spec}
    team.api.create(path, body)
    return f"{path}/{name}"


def says(team: Team, job: str, text: str) -> None:
    eventually(f"{job} says {text}", lambda: text in team.status(job).get("message", ""))


def gives_way(team: Team, job: str, kind: str, path: str) -> None:
    """Check that the job waits for the name, and creates its object once it is free."""
    says(team, job, f"{kind} '{path.rpartition('/')[2]}' already exists")
    team.api.delete(path)
    eventually("it is gone", lambda: _is_ours(team.api.get(path)) is not False)
    # An edit by the user is tried at once.
    changed = {"spec": {"annotations": {"freed": kind}}}
    team.api.patch(f"{team.group}/torchrunjobs/{job}", changed)


def _is_ours(body: Any) -> bool | None:
    return None if body is None else "torchrun-job-name" in body["metadata"].get("labels", {})


# The shortest histories that use every verb on every kind


def life_of_a_job(team: Team) -> None:
    """Taken names, a failure, suspensions and an end; and one deletion after the end."""
    team.make_queue(networking={"isolate": True})
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    taken = [
        ("PersistentVolumeClaim", f"{team.core}/persistentvolumeclaims", "run-workspace", claim),
        ("Pod", f"{team.core}/pods", "run-sync-0", template["spec"]),
        ("Job", f"{team.batch}/jobs", "run", {"suspend": True, "template": template}),
    ]
    paths = [(kind, others(team, path, kind, name, spec=spec)) for kind, path, name, spec in taken]
    team.submit("run", volumes=WORKSPACE)
    for kind, path in paths[:2]:
        gives_way(team, "run", kind, path)
    team.has(f"{team.core}/pods/run-sync-0")
    eventually("it is ours", lambda: _is_ours(team.api.get(f"{team.core}/pods/run-sync-0")))
    team.pod_becomes("run-sync-0", "Succeeded")
    for kind, path in paths[2:]:
        gives_way(team, "run", kind, path)
    for pod in team.workers("run"):
        team.pod_becomes(pod, "Running")
    team.reaches("run", "Running")
    first, *_ = team.workers("run")
    team.pod_becomes(first, "Failed", "ValueError")
    team.has(f"{team.batch}/jobs/run-r1")
    for suspend in (True, False, True, False):
        team.api.patch(f"{team.group}/torchrunjobs/run", {"spec": {"suspend": suspend}})
        team.reaches("run", "Suspended" if suspend else "Queued")
    service = others(team, f"{team.core}/services", "Service", "web", spec={"clusterIP": "None"})
    team.submit("web")
    gives_way(team, "web", "Service", service)
    eventually("it is ours", lambda: _is_ours(team.api.get(service)))
    team.submit("brief", numNodes=1, reliability={"ttlSecondsAfterFinished": 0})
    for pod in team.workers("brief", 1):
        team.pod_becomes(pod, "Succeeded")
    eventually("its time to live is over", lambda: team.job("brief") is None)
    team.submit("large", numNodes=4)
    workers = team.workers("large", 4)
    for pod in workers:
        team.pod_becomes(pod, "Running")
    team.reaches("large", "Running")
    team.pod_becomes(workers[0], "Failed", "ValueError")
    team.has(f"{team.batch}/jobs/large-r1")


def gangs(teams: dict[str, Team], schedulers: Any) -> None:
    """A group whose name is taken, then created, and deleted with its gang."""
    for gang, group, version, plural, kind, spec in schedulers:
        team = teams[gang]
        team.make_queue(scheduling={"gang": gang})
        path = f"/apis/{group}/{version}/namespaces/{team.name}/{plural}"
        others(team, path, kind, "run", spec=spec)
        team.submit("run", numNodes=1)
    for gang, group, version, plural, kind, _ in schedulers:
        team = teams[gang]
        path = f"/apis/{group}/{version}/namespaces/{team.name}/{plural}/run"
        gives_way(team, "run", kind, path)
        eventually("its group", lambda: _is_ours(team.api.get(path)))  # noqa: B023
        team.api.patch(f"{team.group}/torchrunjobs/run", {"spec": {"suspend": True}})
        eventually("its group goes", lambda: team.api.get(path) is None)  # noqa: B023


def create_parent_queue(team: Team) -> str:
    """Create the KAI queue that is the parent of ours, and return the path of KAI queues."""
    path = "/apis/scheduling.run.ai/v2/queues"
    if team.api.get(f"{path}/default") is None:
        others(team, path, "Queue", "default", spec={"resources": {}})
    return path


def life_of_a_queue(team: Team) -> None:
    """KAI queue and deletion of a queue."""
    parent = create_parent_queue(team)
    team.make_queue(kaiQueue=team.name)
    for kind in ("TemplateValid", "KaiQueueReady", "Ready"):
        eventually(kind, lambda kind=kind: condition(team, kind).get("status") == "True")  # type: ignore[misc]
    queue = f"{team.group}/torchrunqueues/research"
    team.api.delete(queue)
    eventually("its KAI queue goes", lambda: team.api.get(f"{parent}/{team.name}") is None)
    eventually("it goes", lambda: team.api.get(queue) is None)


def test_exactly_the_granted_permissions_are_used(
    cluster: LocalCluster, api: Api, team: Team, audit: Audit, tmp_path: Path
) -> None:
    grant(cluster, ACCOUNT)
    leader = controller(cluster, tmp_path, ACCOUNT, *LEASE, *PROGRESS)
    standby = controller(cluster, tmp_path / "standby", ACCOUNT, *LEASE)
    teams = {gang[0]: Team(api) for gang in GANGS}
    with leader.running():
        leader.wait_for_line("controllers started")
        with standby.running():
            standby.wait_for_line("the lease has a holder")
            life_of_a_job(team)
        gangs(teams, GANGS)
        life_of_a_queue(Team(api))
        (worker,) = team.workers("run", 2)[:1]
        Reporter(leader).send(token(team, worker))
    entries = audit.entries(ACCOUNT)
    assert denied(entries) == set()
    unused = granted() - used(entries) - RARE
    assert unused == set(), "granted but never used"
    assert used(entries) & RARE == set(), "used here after all"


def test_a_missing_optional_permission_is_named(
    cluster: LocalCluster, team: Team, tmp_path: Path
) -> None:
    """Jobs run without it, and the controller continues by itself once it is granted."""
    lacks = (("list", "queues.scheduling.run.ai"), ("list", "events"))
    create_parent_queue(team)
    grant(cluster, "partly", without=lacks)
    with controller(cluster, tmp_path, "partly", *NO_ELECTION).running() as process:
        team.make_queue(kaiQueue=team.name)
        kai_queue = eventually(
            "the condition",
            lambda: (
                "verb list" in condition(team, "KaiQueueReady").get("message", "")
                and condition(team, "KaiQueueReady")
            ),
        )
        assert kai_queue["status"] == "Unknown"
        assert "queues.scheduling.run.ai" in kai_queue["message"]
        eventually("jobs run", lambda: condition(team, "Ready").get("status") == "True")
        ready = eventually("readiness notes it", lambda: noted(process, "[!] watches"))
        assert "cannot list events" in ready
        grant(cluster, "partly")
        eventually("kept", lambda: condition(team, "KaiQueueReady").get("reason") == "Synced")
        eventually("readiness notes nothing", lambda: not noted(process, "[!] watches"))


def noted(process: ControllerProcess, text: str) -> str:
    """The lines of /readyz with the text."""
    port = process.wait_for_line("serving")["port"]
    lines = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).text
    return lines if text in lines else ""


@pytest.mark.long
def test_a_missing_required_permission_is_named_everywhere(
    cluster: LocalCluster, team: Team, tmp_path: Path
) -> None:
    lacks = (("create", "jobs.batch"), ("list", "services"))
    grant(cluster, "lacking", without=lacks)
    with controller(cluster, tmp_path, "lacking", *NO_ELECTION).running() as process:
        body = eventually("readiness", lambda: noted(process, "[-] caches"))
        assert "cannot list services: grant the controller's role the verb list" in body
        grant(cluster, "lacking", without=lacks[:1])
        process.wait_for_line("controllers started")
        team.make_queue()
        team.submit("run")
        says(team, "run", 'cannot create resource "jobs" in API group "batch"')
        grant(cluster, "lacking")
        team.workers("run")
        # The permission is revoked at run time.
        grant(cluster, "lacking", without=(("delete", "jobs.batch"),))
        team.api.patch(f"{team.group}/torchrunjobs/run", {"spec": {"suspend": True}})
        events = f"/apis/events.k8s.io/v1/namespaces/{team.name}/events"
        text = 'cannot delete resource "jobs" in API group "batch"'
        eventually(
            "an event",
            lambda: any(
                text in event["note"]
                for event in team.api.items(events)
                if event["reason"] == "Forbidden"
            ),
        )
        grant(cluster, "lacking")
        team.reaches("run", "Suspended")


def test_a_role_is_enough_for_one_namespace(
    cluster: LocalCluster, team: Team, audit: Audit, tmp_path: Path
) -> None:
    """With the permissions of the overlay, only cluster-wide ones are missing, and are optional."""
    overlay = str(MANIFESTS / "overlays" / "single-namespace")
    rendered = cluster.kubectl("kustomize", overlay).stdout.replace("team-a", team.name)
    for document in yaml.safe_load_all(rendered):
        assert not document["kind"].startswith("Cluster")
        if document["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    own = ("--namespace", team.name, "--lease-namespace", team.name)
    process = controller(cluster, tmp_path, ACCOUNT, *own, namespace=team.name)
    with process.running():
        team.make_queue()
        team.submit("run")
        for pod in team.workers("run"):
            team.pod_becomes(pod, "Succeeded")
        team.reaches("run", "Succeeded")
        notes = eventually("readiness notes it", lambda: noted(process, "[!] machines"))
        assert "lost machines are not detected: cannot list nodes" in notes
    of_the_cluster = {"nodes", "queues.scheduling.run.ai", "topologies.kai.scheduler"}
    lacking = denied(audit.entries(ACCOUNT, team.name))
    assert {resource for _, resource in lacking} == of_the_cluster
    assert {verb for verb, _ in lacking} <= {"list", "watch"}
