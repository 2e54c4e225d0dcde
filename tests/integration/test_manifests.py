"""The manifests on a real API server: they apply, and grant exactly the needed permissions."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrun_cluster import LocalCluster

MANIFESTS = Path(__file__).parents[2] / "manifests"
CONTROLLER = "system:serviceaccount:torchrun-system:torchrun-controller"
NAMESPACE = "default"
WITHIN = 120.0

CHILDREN = {
    "service": {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None"}},
    "persistentvolumeclaim": {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    },
    "pod": {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "sync", "image": "sync"}]},
    },
    "job": {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {
            "suspend": True,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "trainer", "image": "trainer"}],
                }
            },
        },
    },
}


def eventually(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN
    while not check():
        assert time.monotonic() < deadline, f"not within {WITHIN:.0f} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def installed(crds: LocalCluster) -> LocalCluster:
    """Apply the manifests in the order of the installation page."""
    for folder in ("crd", "controller", "rbac"):
        crds.kubectl("apply", "-f", str(MANIFESTS / folder))
    return crds


def can_i(cluster: LocalCluster, user: str, *action: str) -> bool:
    answer = cluster.kubectl("auth", "can-i", *action, f"--as={user}", check=False)
    return answer.stdout.strip() == "yes"


def test_kustomize_applies_the_same(installed: LocalCluster) -> None:
    lines = installed.kubectl("apply", "-k", str(MANIFESTS)).stdout.splitlines()
    assert len(lines) >= 10
    # The API server prunes and rounds nothing, so a second apply changes nothing.
    changed = [line for line in lines if not line.endswith("unchanged")]
    # kubectl always reports the selector of a PodDisruptionBudget as changed (patchStrategy
    # replace).
    assert changed == ["poddisruptionbudget.policy/torchrun-controller configured"]


def test_an_overlay_can_add_the_network_policies(installed: LocalCluster, tmp_path: Path) -> None:
    where = os.path.relpath(MANIFESTS, tmp_path)
    page = (MANIFESTS.parent / "docs" / "security.md").read_text()
    (overlay,) = re.findall(r"```yaml\n(# kustomization\.yaml.*?)```", page, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../../manifests", where))
    rendered = installed.kubectl("kustomize", str(tmp_path)).stdout
    assert "kubernetes.io/metadata.name: observability\n" in rendered
    assert "kubernetes.io/metadata.name: monitoring\n" not in rendered
    dry = ("apply", "-k", str(tmp_path), "--dry-run=server")
    assert "networkpolicy.networking.k8s.io/torchrun-controller created" in (
        installed.kubectl(*dry).stdout
    )


def test_the_overlay_of_one_namespace_applies(installed: LocalCluster) -> None:
    installed.kubectl("create", "namespace", "team-a")
    overlay = ("-k", str(MANIFESTS / "overlays" / "single-namespace"))
    lines = installed.kubectl("apply", "--dry-run=server", *overlay).stdout.splitlines()
    assert len(lines) >= 8
    assert all(line.endswith("created (server dry run)") for line in lines)


def test_the_controllers_pod_is_admitted_under_restricted_pod_security(
    installed: LocalCluster,
) -> None:
    pods = ("get", "pods", "-n", "torchrun-system", "-o", "name")
    eventually(lambda: "pod/torchrun-controller-" in installed.kubectl(*pods).stdout, "a pod")


def apply_as(
    cluster: LocalCluster, user: str, kind: str, name: str
) -> subprocess.CompletedProcess[str]:
    body = {**CHILDREN[kind], "metadata": {"name": name, "namespace": NAMESPACE}}
    return cluster.kubectl(
        *("apply", "--server-side", f"--as={user}", "--validate=ignore", "-f", "-"),
        stdin=json.dumps(body),
        check=False,
    )


@pytest.mark.parametrize("kind", CHILDREN)
def test_the_controller_can_create_its_children(installed: LocalCluster, kind: str) -> None:
    eventually(
        lambda: apply_as(installed, CONTROLLER, kind, "child").returncode == 0, f"apply a {kind}"
    )
    again = apply_as(installed, CONTROLLER, kind, "child")
    assert again.returncode == 0, again.stderr
    installed.kubectl("delete", kind, "child", "-n", NAMESPACE, "--now")


def test_server_side_apply_of_a_missing_object_needs_create(installed: LocalCluster) -> None:
    """Why the role has the verb create in addition to patch."""
    installed.kubectl(
        *("create", "clusterrole", "patch-services", "--verb=get,patch", "--resource=services")
    )
    installed.kubectl(
        *("create", "clusterrolebinding", "patch-services", "--clusterrole=patch-services"),
        "--user=patcher",
    )
    eventually(lambda: can_i(installed, "patcher", "patch", "services"), "the binding")
    answer = apply_as(installed, "patcher", "service", "absent")
    assert 'cannot create resource "services"' in answer.stderr


@pytest.mark.parametrize(
    ("action", "allowed"),
    [
        (("watch", "torchrunjobs.torchrun.ai", "-A"), True),
        (("patch", "torchrunjobs.torchrun.ai/a", "--subresource=status"), True),
        (("create", "events.events.k8s.io"), True),
        (("create", "tokenreviews.authentication.k8s.io"), True),
        (("watch", "events", "-A"), True),
        (("delete", "pods"), True),
        (("patch", "leases.coordination.k8s.io", "-n", "torchrun-system"), True),
        (("patch", "leases.coordination.k8s.io", "-n", "default"), False),
        (("delete", "leases.coordination.k8s.io", "-n", "torchrun-system"), False),
        (("patch", "torchrunjobs.torchrun.ai"), False),
        (("delete", "torchrunjobs.torchrun.ai"), True),
        (("delete", "torchrunqueues.torchrun.ai"), False),
        (("patch", "torchrunqueues.torchrun.ai"), True),
        (("update", "torchrunqueues.torchrun.ai"), False),
        (("patch", "torchrunqueues.torchrun.ai/a", "--subresource=status"), True),
        (("delete", "persistentvolumeclaims"), False),
        (("delete", "services"), False),
        (("create", "secrets"), True),
        *(((verb, "secrets"), False) for verb in ("get", "list", "watch", "patch", "delete")),
        (("get", "configmaps"), False),
        (("create", "pods", "--subresource=exec"), False),
        (("create", "serviceaccounts", "--subresource=token"), False),
        (("watch", "nodes"), True),
        (("get", "nodes", "-A"), False),
        (("patch", "networkpolicies.networking.k8s.io"), True),
        (("delete", "networkpolicies.networking.k8s.io"), False),
        (("patch", "nodes"), False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_permissions_of_the_controller(
    installed: LocalCluster, action: tuple[str, ...], allowed: bool
) -> None:
    assert can_i(installed, CONTROLLER, *action) is allowed


@pytest.fixture(scope="module")
def users(installed: LocalCluster) -> LocalCluster:
    """Users with the default ClusterRole of the same name in a namespace."""
    for role in ("view", "edit", "admin"):
        installed.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}")
    jobs, queues = "torchrunjobs.torchrun.ai", "torchrunqueues.torchrun.ai"
    # A controller aggregates the roles asynchronously.
    eventually(lambda: can_i(installed, "edit", "create", jobs), "edit makes jobs")
    eventually(lambda: can_i(installed, "admin", "create", queues), "admin makes queues")
    # The rules of view arrive in the other two by way of each other.
    for user in ("view", "edit", "admin"):
        eventually(lambda user=user: can_i(installed, user, "list", queues), f"{user} sees queues")
    return installed


JOBS, QUEUES = "torchrunjobs.torchrun.ai", "torchrunqueues.torchrun.ai"
USERS = ("view", "edit", "admin")
# Each action with the least privileged user who may do it; "" for none.
DONE: tuple[tuple[tuple[str, ...], str], ...] = (
    *(((verb, JOBS), "view") for verb in ("get", "list", "watch")),
    *(((verb, QUEUES), "view") for verb in ("get", "list", "watch")),
    (("get", JOBS, "--subresource=status"), "view"),
    (("get", QUEUES, "--subresource=status"), "view"),
    (("get", JOBS, "--subresource=scale"), "view"),
    *(((verb, JOBS), "edit") for verb in ("create", "update", "patch", "delete")),
    (("patch", JOBS, "--subresource=scale"), "edit"),
    (("update", JOBS, "--subresource=scale"), "edit"),
    *(((verb, QUEUES), "admin") for verb in ("create", "update", "patch", "delete")),
    (("update", JOBS, "--subresource=status"), ""),
    (("patch", JOBS, "--subresource=status"), ""),
    (("patch", QUEUES, "--subresource=status"), ""),
    # Other requests of the plugin.
    (("list", "pods"), "view"),
    (("get", "pods", "--subresource=log"), "view"),
    (("get", "pods", "--subresource=proxy"), "edit"),
    (("update", "pods", "--subresource=proxy"), "edit"),
    (("create", "pods", "--subresource=exec"), "edit"),
    (("create", "pods", "--subresource=portforward"), "edit"),
    (("create", "pods"), "edit"),
    (("delete", "pods"), "edit"),
    (("list", "events"), "view"),
    (("list", "nodes"), ""),
)


@pytest.mark.parametrize(("action", "least"), DONE, ids=["-".join(action) for action, _ in DONE])
def test_users_get_their_permissions_from_the_default_roles(
    users: LocalCluster, action: tuple[str, ...], least: str
) -> None:
    may = USERS[USERS.index(least) :] if least else ()
    assert tuple(user for user in USERS if can_i(users, user, *action)) == may
