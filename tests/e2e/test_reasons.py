"""The reason of a waiting job names its obstacle, and disappears with it."""

import pytest

from e2e.manifests import job, queue, zip_job
from e2e.space import CHILDREN, Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SERVICES, Kind

HELLO = ["python3", "-c", "print('hello')"]
POD_SPEC = {
    "restartPolicy": "Never",
    "containers": [{"name": "c", "image": "localhost:1/none", "command": ["true"]}],
}
FOREIGN: dict[str, tuple[Kind, str, JsonObject]] = {
    "service": (SERVICES, "taken", {"ports": [{"port": 80}]}),
    "claim": (
        *(CLAIMS, "taken-workspace"),
        {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    ),
    "pod": (PODS, "taken-sync-0", POD_SPEC),
    "job": (JOBS, "taken", {"suspend": True, "template": {"spec": POD_SPEC}}),
}


def test_each_obstacle_is_reported_and_does_not_affect_other_jobs(space: Space):
    storage = {
        "workspace": {"size": "1Mi", "storageClassName": "no-such-class", "delivery": "shared"}
    }
    space.apply(
        queue("broken", "localhost:1/no/such:image"),
        job("pull", "broken", HELLO),
        queue("nowhere", space.cluster.controller, storage=storage),
        zip_job("unbound", "nowhere", HELLO),
        job("early", "late", HELLO),
        job("nodeless", "plain", HELLO, 2, scheduling={"nodeSelector": {"no-such": "node"}}),
    )

    status = space.wait_reason("early", "QueueNotFound")
    assert status["phase"] == "Pending"
    assert "late" in status["message"]
    space.apply(queue("late", space.cluster.controller))
    space.wait_phase("early", "Succeeded")

    space.wait_reason("unbound", "ProvisioningFailed")
    space.wait_message("unbound", "unbound-workspace", "no-such-class")

    space.wait_reason("nodeless", "Unschedulable")
    nodes = space.cluster.nodes
    # The scheduler tries one pod after the other.
    space.wait_message(
        "nodeless",
        "0 of 2 pods are scheduled. 2 of 2 pods",
        f"0 of {nodes} nodes are available: {nodes} not matching nodeSelector or affinity",
    )

    # The kubelet reports a failed pull at the next sync of the pod, after ten seconds.
    space.wait_reason("pull", "ImagePullFailed")
    space.wait_message("pull", "localhost:1/no/such:image", "pull-0")


@pytest.mark.parametrize("which", FOREIGN)
def test_an_object_of_another_owner_with_our_name_is_left_alone(space: Space, which: str):
    kind, name, spec = FOREIGN[which]
    body = {"apiVersion": kind.api_version, "kind": kind.kind, "spec": spec}
    space.apply({**body, "metadata": {"name": name, "labels": {"owner": "somebody"}}})
    with space.history(kind) as history:
        made = history.until(lambda o: o["metadata"].get("uid"), name=name)
        # A job without a workspace creates its Service and Job at once.
        wanted = job if which in ("service", "job") else zip_job
        space.apply(wanted("taken", "plain", HELLO, 2))
        status = space.wait_reason("taken", "NameConflict")
        assert name in status["message"]
        assert history.uids()[name] == {made}
        for state in history.states(name):
            assert state["spec"].items() >= spec_of(history.states(name)[0], which).items()
            assert state["metadata"]["labels"]["owner"] == "somebody"
            assert "ownerReferences" not in state["metadata"]
            managers = {f["manager"] for f in state["metadata"].get("managedFields", [])}
            assert not any("torchrun" in manager for manager in managers)


def spec_of(state: JsonObject, which: str) -> JsonObject:
    """The part of the spec that only its owner changes; schedulers and binders write the rest."""
    own = {"service": "ports", "claim": "accessModes", "pod": "restartPolicy", "job": "suspend"}
    return {own[which]: state["spec"][own[which]]}


def test_a_deleted_job_leaves_no_objects(space: Space):
    space.apply(zip_job("gone", "plain", HELLO))
    space.wait_reason("gone", "WaitingForUpload")
    space.kubectl("delete", "torchrunjob", "gone")
    for kind in CHILDREN:
        selector = ("-l", "torchrun-job-name=gone")
        space.kubectl("wait", kind.plural, *selector, "--for=delete", "--timeout=180s", check=False)
        assert space.kubectl("get", kind.plural, *selector, "-o", "name").strip() == ""
