"""Queues with the rights of the controller's own role, and without that on KAI's queues."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.controller_process import NO_ELECTION, Api, ControllerProcess, eventually
from integration.played_schedulers import KAI_QUEUES, needs
from integration.team import Team
from torchrun_cluster import LocalCluster, Size

ROLE = Path(__file__).parents[2] / "manifests" / "rbac" / "role.yaml"
NAMESPACE = "torchrun-system"
SETTINGS = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"}}

pytestmark = needs(KAI_QUEUES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    name = f"test-rights-{os.getpid()}"
    with LocalCluster(name=name, size=Size.CONTROL_PLANE) as running:
        running.kubectl("create", "namespace", NAMESPACE)
        running.kubectl("create", "serviceaccount", "torchrun-controller", "-n", NAMESPACE)
        running.kubectl("apply", "--server-side", "-f", str(KAI_QUEUES))
        yield running


@pytest.fixture
def team(api: Api) -> Team:
    """Without a queue yet."""
    return Team(api)


def controller(cluster: LocalCluster, folder: Path) -> ControllerProcess:
    """With a token of the controller's ServiceAccount."""
    account = ("torchrun-controller", "-n", NAMESPACE)
    token = cluster.kubectl("create", "token", *account).stdout.strip()
    config = json.loads(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return ControllerProcess(cluster, folder, *NO_ELECTION, "--kubeconfig", str(path))


def grant(cluster: LocalCluster, *, without: str = "") -> None:
    """The role as it is shipped, but for the rules of one API group."""
    for document in yaml.safe_load_all(ROLE.read_text()):
        rules = [
            r for r in document.get("rules", ()) if without not in r["apiGroups"] or not without
        ]
        body = {**document, "rules": rules} if rules else document
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))


def condition(team: Team, kind: str) -> dict[str, Any]:
    queue = team.api.get(f"{team.group}/torchrunqueues/research")
    conditions = queue.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] == kind), {})


def test_the_role_is_enough(cluster: LocalCluster, team: Team, tmp_path: Path) -> None:
    grant(cluster)
    parent = {
        "apiVersion": "scheduling.run.ai/v2",
        "kind": "Queue",
        "metadata": {"name": "default"},
        "spec": {"resources": {}},
    }
    team.api.create("/apis/scheduling.run.ai/v2/queues", parent)
    resources = [{"name": "settings", "template": SETTINGS}]
    with controller(cluster, tmp_path).running():
        team.make_queue(kaiQueue=team.name, resources=resources)
        for kind in ("TemplateValid", "ResourcesReady", "KaiQueueReady", "Ready"):
            eventually(kind, lambda kind=kind: condition(team, kind).get("status") == "True")  # type: ignore[misc]
        team.has(f"/apis/scheduling.run.ai/v2/queues/{team.name}")
        team.api.patch(f"{team.group}/torchrunqueues/research", {"spec": {"resources": []}})
        settings = f"{team.core}/configmaps/research-settings"
        eventually("its object goes", lambda: team.api.get(settings) is None)
        team.api.delete(f"{team.group}/torchrunqueues/research")
        gone = f"/apis/scheduling.run.ai/v2/queues/{team.name}"
        eventually("its KAI queue goes", lambda: team.api.get(gone) is None)
        queue = f"{team.group}/torchrunqueues/research"
        eventually("it goes", lambda: team.api.get(queue) is None)


def test_a_right_that_is_missing_is_named(
    cluster: LocalCluster, team: Team, tmp_path: Path
) -> None:
    grant(cluster, without="scheduling.run.ai")
    with controller(cluster, tmp_path).running():
        team.make_queue(kaiQueue=team.name)
        told = eventually(
            "the condition",
            lambda: (
                "verb list" in condition(team, "KaiQueueReady").get("message", "")
                and condition(team, "KaiQueueReady")
            ),
        )
        assert told["status"] == "Unknown"
        assert "queues.scheduling.run.ai" in told["message"]
        eventually("jobs run", lambda: condition(team, "Ready").get("status") == "True")
        # Once it is granted, the controller goes on by itself.
        grant(cluster)
        eventually("kept", lambda: condition(team, "KaiQueueReady").get("reason") == "Kept")
