"""Every alert fires by its cause, and every panel has data. The tests run in the order of this file.

One Prometheus scrapes real controllers with the permissions of the manifests, on a real control
plane with simulated nodes. Later tests use the data of earlier ones.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from integration.controller_process import Api, eventually
from integration.team import GROUP, WORKSPACE, Team
from integration.test_progress import Reporter, token
from monitoring.conftest import HERE, NODES, ROOT, SYSTEM, Controllers
from monitoring.proxy import Proxy
from monitoring.server import Prometheus
from monitoring.shortened import ALERTS
from torchrun_cluster import LocalCluster
from torchrun_controller.client.credentials import tls_context

pytestmark = pytest.mark.timeout(300)

LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
FLOW_CONTROL = "/apis/flowcontrol.apiserver.k8s.io/v1"
ENDS_WELL = {"labels": {"ends": "well"}}
ENDS_BADLY = {"labels": {"ends": "badly"}}
MANY = 14  # restarts
TOLD: dict[str, str] = {}  # the job of the job dashboard


def test_no_controller(prometheus: Prometheus) -> None:
    prometheus.fires("TorchrunControllerDown")


def test_a_day_with_two_replicas(
    controllers: Controllers, prometheus: Prometheus, api: Api
) -> None:
    progress = ("--progress-url", "http://controller.test:8081", "--progress-port", "0")
    flags = ("--metrics-jobs", "20", *progress)
    team = Team(api)
    team.make_queue()
    with controllers.running("first", *flags) as first:
        first.wait_for_line("controllers started")
        with controllers.running("second", *flags) as second:
            reporter = Reporter(first)
            _nothing_fires_while_all_is_well(prometheus, team, reporter)
            _jobs_and_queues(prometheus, team, reporter)
            _a_lost_node(prometheus, team)
            counted = prometheus.value("sum(torchrun_restarts_total)")
            assert counted >= MANY
            first.kill()
            prometheus.fires("TorchrunControllerScrapeFailing", instance="first")
            second.wait_for_line("controllers started")
            _the_successor_counts_nothing_again(prometheus, team)


def _nothing_fires_while_all_is_well(
    prometheus: Prometheus, team: Team, reporter: Reporter
) -> None:
    team.submit("quick", **ENDS_WELL)
    team.submit("trains", env=[])
    team.reaches("quick", "Succeeded")
    team.reaches("trains", "Running")
    pod = team.workers("trains")[0]
    values = {"totalSteps": 100, "loss": 2.75, "samplesPerSecond": 31.5}
    _report(reporter, token(team, pod), step=1, **values)
    checkpoint = {"step": 1, "path": "/checkpoints/1", "time": "2026-01-02T03:04:05.678901Z"}
    _report(reporter, token(team, pod), checkpoints=[checkpoint])
    TOLD.update(namespace=team.name, torchrun_job="trains")
    eventually("one leader", lambda: prometheus.value("sum(torchrun_leader)") == 1)
    eventually("two replicas", lambda: prometheus.value("count(torchrun_leader)") == 2)
    eventually("both are exported", lambda: prometheus.value('torchrun_jobs{phase="Running"}') == 1)
    eventually("nothing fires", lambda: not prometheus.firing())


def _jobs_and_queues(prometheus: Prometheus, team: Team, reporter: Reporter) -> None:
    team.submit("nowhere", jobQueue="none")
    team.submit("uploads", volumes=WORKSPACE)
    _queue(team, "broken", podTemplate={"spec": {"terminationGracePeriodSecond": 5}})
    _queue(team, "gpus", nodeResources={"cpus": 1, "gpus": 8})
    _queue(team, "quota", quota={"jobs": 1}, nodeResources={"cpus": 1})
    team.submit("half", jobQueue="gpus")
    team.reaches("half", "Running")
    team.submit("huge", jobQueue="gpus", numNodes=NODES)
    team.submit("modest", jobQueue="quota")
    team.reaches("modest", "Running")
    team.submit("urgent", jobQueue="quota", priority=10)
    for number in range(MANY):
        team.submit(f"bad-{number}", numNodes=1, reliability={"maxRestarts": 1}, **ENDS_BADLY)
    prometheus.fires("TorchrunRestartStorm", kind="failure")
    # The status takes a step every ten seconds at most.
    pod = team.workers("trains")[0]
    _report(reporter, token(team, pod), step=50, totalSteps=100)
    networks = [
        {"transport": "IB", "device": "mlx5_0", "nodes": 1, "firstNode": 0},
        {"transport": "Socket", "device": "eth0", "nodes": 1, "firstNode": 1},
    ]
    _report(reporter, token(team, pod), restartsInPlace={"network": networks})
    prometheus.fires("TorchrunNetworkSlow")
    prometheus.fires("TorchrunJobsBlocked", reason="QueueNotFound")
    prometheus.fires("TorchrunJobsStuck", phase="Syncing")
    prometheus.fires("TorchrunQueueNotReady", queue="broken", reason="TemplateInvalid")
    prometheus.fires("TorchrunGpusIdle")
    team.reaches("urgent", "Running")
    gave_way = 'torchrun_preemptions_total{reason="HigherPriority"}'
    eventually("modest is counted", lambda: prometheus.value(gave_way) == 1)
    result = json.dumps({"revision": 1, "sha256": "0" * 64, "bytes": 5_000_000})
    team.pod_becomes("uploads-sync-0", "Succeeded", result)
    team.reaches("uploads", "Queued")
    eventually("bytes", lambda: prometheus.value("sum(torchrun_sync_bytes_sum)") == 5_000_000)
    hours = "sum(torchrun_queue_gpu_seconds_total)"
    eventually("GPU seconds", lambda: prometheus.value(hours) > 16)


def _report(reporter: Reporter, secret: str, **values: object) -> None:
    """Report, and again while the controller limits the reports of the pod."""
    eventually(f"{values} is accepted", lambda: reporter.send(secret, **values) == 204)


def _queue(team: Team, name: str, **spec: object) -> None:
    body = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunQueue",
        "metadata": {"name": name},
        "spec": {"image": "trainer:1", **spec},
    }
    team.api.create(f"{team.group}/torchrunqueues", body)


def _a_lost_node(prometheus: Prometheus, team: Team) -> None:
    (node,) = {
        pod["spec"]["nodeName"]
        for pod in team.api.items(f"{team.core}/pods", "torchrun-job-name=trains")
        if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "0"
    }
    team.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"heart": None}}})
    prometheus.fires("TorchrunWorkersUnfenced", seconds=120)
    team.api.delete(f"/api/v1/nodes/{node}")


def _the_successor_counts_nothing_again(prometheus: Prometheus, team: Team) -> None:
    """It exports all jobs, but no restarts that the previous leader has counted."""
    query = 'sum(torchrun_jobs{instance="second"})'
    eventually("the successor exports", lambda: prometheus.value(query) > MANY)
    stands = sum(team.status(f"bad-{number}").get("restarts", 0) for number in range(MANY))
    assert stands == MANY
    assert prometheus.value('sum(torchrun_restarts_total{instance="second",kind="failure"})') == 0
    spent = 'sum(torchrun_queue_gpu_seconds_total{instance="%s"})'
    first = max(prometheus.values(spent % "first"))
    # It has led for a short time, and does not count earlier GPU seconds.
    assert prometheus.value(spent % "second") < first


def test_leases(controllers: Controllers, prometheus: Prometheus, api: Api) -> None:
    now = "2026-01-01T00:00:00.000000Z"
    spec = {"holderIdentity": "ghost-0", "leaseDurationSeconds": 3600, "renewTime": now}
    api.create(LEASES, {"metadata": {"name": "haunted"}, "spec": spec})
    only = ("--namespace", "default")
    with controllers.running("waits", "--lease-name", "haunted", *only):
        prometheus.fires("TorchrunControllerNoLeader", lease=f"{SYSTEM}/haunted")
        for number in range(1, 8):
            spec["holderIdentity"] = f"ghost-{number}"
            api.patch(f"{LEASES}/haunted", {"spec": spec})
            time.sleep(1.5)  # each value is observed and scraped
        prometheus.fires("TorchrunLeaderChangesOften")
    with controllers.running("one", "--lease-name", "a"), controllers.running("two", *only):
        prometheus.fires("TorchrunControllerSeveralLeaders")


def test_bad_connections(
    controllers: Controllers, prometheus: Prometheus, cluster: LocalCluster, api: Api
) -> None:
    team = Team(api)
    team.make_queue()
    proxy = Proxy(cluster.server)
    only = ("--leader-election", "false", "--namespace", team.name)
    with controllers.running("far", *only, server=proxy.url) as far:
        far.wait_for_line("controllers started")
        team.submit("strange", numNodes=1)
        (pod,) = team.workers("strange", 1)
        team.reaches("strange", "Running")
        api.patch(f"{team.core}/pods/{pod}/status", {"status": {"phase": "Strange"}})
        prometheus.fires("TorchrunObjectsUnreadable", resource="pods")
        for _ in range(14):
            proxy.cut()
            time.sleep(2.5)  # a watch shorter than a second has another cause
        prometheus.fires("TorchrunWatchUnstable", resource="pods", cause="Broken")
        proxy.slow(6)
        for number in range(150):
            team.submit(f"many-{number}", numNodes=1, suspend=True)
        prometheus.fires("TorchrunWorkqueueBacklog", name="job")
        prometheus.fires("TorchrunReconcileSlow", controller="job")
        proxy.close()
        prometheus.fires("TorchrunApiErrors")
        prometheus.fires("TorchrunWatchStale", seconds=150)
        far.kill()


def test_rights_and_throttling(
    controllers: Controllers, prometheus: Prometheus, cluster: LocalCluster, api: Api
) -> None:
    team = Team(api)
    team.make_queue()
    only = ("--leader-election", "false", "--namespace", team.name)
    with controllers.running("poor", *only) as poor:
        poor.wait_for_line("controllers started")
        cluster.kubectl("delete", "clusterrolebinding", "torchrun-controller")
        for number in range(20):
            team.submit(f"job-{number}", numNodes=1, suspend=True)
        resource = "torchrunjobs.torchrun.ai/status"
        prometheus.fires("TorchrunApiForbidden", verb="patch", resource=resource)
        prometheus.fires("TorchrunReconcileErrors", controller="job")
        cluster.kubectl("apply", "-f", str(ROOT / "manifests/rbac"))
        _throttle(api)
        with _last_seat_taken(cluster, api, team):
            for number in range(20):
                team.submit(f"more-{number}", numNodes=1)
            prometheus.fires("TorchrunApiThrottled", resource="jobs.batch")
        api.delete(f"{FLOW_CONTROL}/flowschemas/shed")


def _throttle(api: Api) -> None:
    """A priority level without seats for the Job writes of the controller."""
    limited: dict[str, Any] = {"nominalConcurrencyShares": 0, "limitResponse": {"type": "Reject"}}
    limited |= {"lendablePercent": 0, "borrowingLimitPercent": 0}
    level = {"type": "Limited", "limited": limited}
    api.create(
        f"{FLOW_CONTROL}/prioritylevelconfigurations",
        {"metadata": {"name": "shed"}, "spec": level},
    )
    account = {"namespace": SYSTEM, "name": "torchrun-controller"}
    rule = {
        "subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
        "resourceRules": [
            {"verbs": ["patch"], "apiGroups": ["batch"], "resources": ["jobs"], "namespaces": ["*"]}
        ],
    }
    spec = {
        "matchingPrecedence": 2,
        "priorityLevelConfiguration": {"name": "shed"},
        "rules": [rule],
    }
    api.create(f"{FLOW_CONTROL}/flowschemas", {"metadata": {"name": "shed"}, "spec": spec})

    def in_force() -> bool:
        status = api.get(f"{FLOW_CONTROL}/flowschemas/shed").get("status", {})
        return any(c["status"] == "False" for c in status.get("conditions", ()))

    eventually("the flow schema is in force", in_force)


@contextmanager
def _last_seat_taken(cluster: LocalCluster, api: Api, team: Team) -> Iterator[None]:
    """Occupy the last seat with a request whose body never arrives.

    A level without seats still serves one request at a time: k8s.io/apiserver,
    queueset.canAccommodateSeatsLocked. Sequential requests are never refused.
    """
    make = ("create", "token", "-n", SYSTEM, "torchrun-controller")
    head = (
        f"PATCH {team.batch}/jobs/slow HTTP/1.1\r\nHost: kubernetes\r\n"
        f"Authorization: Bearer {cluster.kubectl(*make).stdout.strip()}\r\n"
        "Content-Type: application/apply-patch+yaml\r\nContent-Length: 9\r\n\r\n"
    )
    server = urlsplit(cluster.server)
    context = tls_context(str(cluster.ca_file))
    executing = re.compile(
        r'(?m)^apiserver_flowcontrol_current_executing_requests{[^}]*="shed"} 1$'
    )
    with (
        socket.create_connection((server.hostname, server.port)) as plain,
        context.wrap_socket(plain, server_hostname=server.hostname) as connection,
    ):
        connection.sendall(head.encode())
        eventually("the seat is taken", lambda: executing.search(api.text("/metrics")))
        yield


def test_bugs(controllers: Controllers, prometheus: Prometheus, api: Api) -> None:
    team = Team(api)
    team.make_queue()
    only = ("--leader-election", "false", "--namespace", team.name, "--workers", "1")
    with controllers.running("faulty", *only, program=HERE / "faulty.py") as faulty:
        faulty.wait_for_line("controllers started")
        team.submit("panic")
        prometheus.fires("TorchrunReconcilePanics")
        team.submit("hang")
        prometheus.fires("TorchrunWorkqueueStuck", name="job")
        faulty.kill()


def test_every_alert_has_fired(prometheus: Prometheus) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"]
    for name in (rule["alert"] for group in rules for rule in group["rules"]):
        firing = f'last_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[1h])'
        assert prometheus.query(firing), f"{name} has never fired"


def _queries() -> list[Any]:
    return [
        pytest.param(target["expr"], id=f"{board.stem}: {panel['title']} {target['refId']}")
        for board in sorted((ROOT / "manifests/monitoring/grafana").glob("*.json"))
        for panel in json.loads(Path(board).read_text())["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.parametrize("expr", _queries())
def test_every_panel_has_data(prometheus: Prometheus, expr: str) -> None:
    chosen = {
        "__rate_interval": "10s",
        "__range": "10m",
        "namespace": TOLD.get("namespace", "") if "torchrun_job_" in expr else ".*",
        "queue": ".*",
        "torchrun_job": TOLD.get("torchrun_job", ""),
    }
    filled = re.sub(r"\$(\w+)", lambda found: chosen[found[1]], expr)
    assert prometheus.values(filled), filled


def test_starts_can_be_traced_to_their_jobs(prometheus: Prometheus, api: Api) -> None:
    """A bucket has one exemplar: of gangs that start within one scrape, the last one is named."""
    jobs = {
        f"{job['metadata']['namespace']}/{job['metadata']['name']}": job.get("status", {})
        for job in api.items(f"{GROUP}/torchrunjobs")
    }
    found = prometheus.exemplars("torchrun_gang_start_seconds_bucket")
    assert {series["seriesLabels"]["attempt"] for series in found} == {"first", "later"}
    for series in found:
        for exemplar in series["exemplars"]:
            status = jobs[exemplar["labels"]["torchrun_job"]]
            began = datetime.fromisoformat(status["startTime"]).timestamp()
            late = exemplar["timestamp"] - began
            if series["seriesLabels"]["attempt"] == "first":
                assert 0 <= late < 3, (exemplar, status)  # the API's times are whole seconds
            else:
                assert late > 0, (exemplar, status)
                assert status["attempt"] > 0, (exemplar, status)
