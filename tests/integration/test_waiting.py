"""Reasons of a waiting gang from the real API server, quota and Job controller.

There is no scheduler and no kubelet. Unit tests and tests/e2e cover their messages.
"""

from typing import Any

import pytest

from integration.controller_process import Api, eventually
from integration.team import WORKSPACE, Team

pytestmark = pytest.mark.usefixtures("team_controller")


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    matching_condition: dict[str, Any] = next(c for c in status["conditions"] if c["type"] == kind)
    return matching_condition


def limit(team: Team, **hard: str) -> None:
    body = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
    team.api.create(f"{team.core}/resourcequotas", body)

    def in_force() -> bool:
        resource_quota = team.api.get(f"{team.core}/resourcequotas/small")
        return bool(resource_quota.get("status", {}).get("hard"))

    eventually("the quota is in force", in_force)


def reasons(team: Team, job: str) -> list[str]:
    """The reasons of the events of a job."""
    events = team.api.items(f"{team.core}/events")
    return [e["reason"] for e in events if e["involvedObject"]["name"] == job]


def test_a_quota_that_refuses_some_pods(team: Team) -> None:
    limit(team, pods="1")
    team.submit("run")
    team.reaches("run", "Queued", "QuotaExceeded")
    message = "1 of 2 pods is created. ResourceQuota small is exhausted"
    # The refusal of the second pod may be known before the first pod.
    eventually("the message", lambda: message in team.status("run").get("message", ""))
    status = team.status("run")
    assert condition(status, "Scheduled")["reason"] == "QuotaExceeded"
    eventually("one event", lambda: reasons(team, "run").count("QuotaExceeded") == 1)
    team.api.patch(f"{team.core}/resourcequotas/small", {"spec": {"hard": {"pods": "2"}}})
    # The Job controller retries with growing delays.
    team.workers("run")
    team.reaches("run", "Queued", "WorkersStarting")


def test_a_quota_of_cpu_and_memory_counts_every_container(team: Team, api: Api) -> None:
    spec = {"spec": {"nodeResources": {"cpus": 1, "memory": "1Gi"}}}
    api.patch(f"{team.group}/torchrunqueues/research", spec)
    limit(team, **{"requests.cpu": "9", "requests.memory": "9Gi", "limits.memory": "9Gi"})
    team.submit("run")
    team.workers("run")
    team.submit("code", volumes=WORKSPACE)
    eventually("a sync pod", lambda: team.api.get(f"{team.core}/pods/code-sync-0"))


def test_a_quota_of_cpu_limits_needs_a_default(team: Team) -> None:
    limit(team, **{"limits.cpu": "9"})
    team.submit("run")
    status = team.reaches("run", "Queued", "PodsRefused")
    assert "must specify limits.cpu for: launcher,trainer" in status["message"]
    default = {"type": "Container", "default": {"cpu": "2"}}
    body = {"metadata": {"name": "default"}, "spec": {"limits": [default]}}
    team.api.create(f"{team.core}/limitranges", body)
    team.workers("run")


def test_a_pod_security_profile_that_refuses_the_gang(team: Team, api: Api) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.patch(f"/api/v1/namespaces/{team.name}", {"metadata": {"labels": label}})
    team.submit("run")
    status = team.reaches("run", "Queued", "PodSecurity")
    assert 'violates PodSecurity "restricted:latest"' in status["message"]
    assert 'container "trainer"' in status["message"]


def test_a_missing_service_account(team: Team, api: Api) -> None:
    spec = {"spec": {"serviceAccountName": "nobody"}}
    api.patch(f"{team.group}/torchrunqueues/research", spec)
    team.submit("run")
    status = team.reaches("run", "Queued", "PodsRefused")
    assert 'serviceaccount "nobody" not found' in status["message"]


def test_a_quota_on_claims(team: Team) -> None:
    limit(team, persistentvolumeclaims="0")
    team.submit("run", volumes=WORKSPACE)
    status = team.reaches("run", "Pending", "QuotaExceeded")
    assert "persistentvolumeclaims run-workspace: ResourceQuota small" in status["message"]


def test_a_missing_storage_class(team: Team) -> None:
    workspace = {**WORKSPACE["workspace"], "storageClassName": "no-such-class"}
    team.submit("run", volumes={"workspace": workspace})
    status = team.reaches("run", "Syncing", "ProvisioningFailed")
    assert "PVC run-workspace (storage class no-such-class" in status["message"]
    assert "not found" in status["message"]


def test_no_default_class(team: Team) -> None:
    team.submit("run", volumes=WORKSPACE)
    status = team.reaches("run", "Syncing", "NoStorageClass")
    assert "Set storageClassName" in status["message"]


def test_without_a_storage_class_a_serve_pod_is_created(team: Team) -> None:
    """The real API server accepts it under the restricted profile."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    team.api.patch(f"/api/v1/namespaces/{team.name}", label)
    team.submit("run", volumes={"workspace": {"source": "zip"}})
    pod = team.has(f"{team.core}/pods/run-serve-0")
    assert [container["name"] for container in pod["spec"]["containers"]] == ["sync", "serve"]
    assert team.children("pods", "run") == ["run-serve-0"]


def test_a_read_write_once_claim_and_a_gang_of_two(team: Team) -> None:
    workspace = {**WORKSPACE["workspace"], "accessMode": "ReadWriteOnce"}
    team.submit("run", volumes={"workspace": workspace})
    status = team.reaches("run", "Syncing", "NoStorageClass")
    assert condition(status, "StorageShared")["reason"] == "ReadWriteOnce"
    eventually("its event", lambda: reasons(team, "run").count("ReadWriteOnce") == 1)
