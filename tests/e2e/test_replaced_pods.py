"""The launchers of a gang with real pods, if the Job controller replaces single pods.

The controller does not create such Jobs. The test takes a Job that it has created, lets the Job
controller replace pods, and opens the gates of new pods itself.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bodies import Body
from e2e.manifests import job
from e2e.space import Space, until
from torchrun_api import contract, names
from torchrun_api.kinds import JOBS, PODS

# Only the ranks of the last round end.
COMMAND = 'echo "round $TORCHRUN_ROUND"; [ "$TORCHRUN_ROUND" = 2 ] || exec sleep 1000'
LIMITS = {"restarts": 0, "exitCodes": [], "signals": [], "replaceSeconds": 300}
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"


def job_that_replaces_pods(space: Space) -> None:
    """Apply a Job as of the controller's, with a Service for its pods; both belong to no job."""
    space.apply(job("train", "plain", COMMAND, nodes=2))
    space.wait("job/train", "jsonpath={.status.active}=2")
    body = space.get(JOBS, "train")
    space.kubectl("delete", "torchrunjob/train", "--cascade=foreground")
    for kind in ("service", "job"):
        space.wait(f"{kind}/train", "delete")
    until(lambda: not items(space, "train"), "the pods of the controller's Job are gone")
    template = body["spec"]["template"]
    template["metadata"].pop("labels")
    assert template["metadata"]["annotations"][names.START] == "0", "it opens no new pod"
    (container,) = template["spec"]["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    variables[contract.IN_PLACE_RESTARTS.name]["value"] = json.dumps(LIMITS)
    size = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    policy = {"backoffLimitPerIndex": 1000, "podReplacementPolicy": "Failed"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "train"}}
    template["metadata"]["labels"] = {"app": "train"}
    space.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "train"}, "spec": spec},
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "train"},
            "spec": {**size, **policy, "template": template},
        },
    )


def items(space: Space, job_name: str) -> list[Body]:
    selector = {"labelSelector": f"job-name={job_name}"}
    listed: dict[str, Any] = space.api.get(PODS.path(space.name), params=selector).json()
    return list(listed["items"])


def pod_of(space: Space, index: int, is_it: Callable[[Body], bool] = lambda _: True) -> Body:
    """Wait for the pod of an index."""
    found: list[Body] = []

    def look() -> bool:
        pods = (
            p for p in items(space, "train") if p["metadata"]["annotations"][INDEX] == str(index)
        )
        found[:] = [pod for pod in pods if is_it(pod)]
        return bool(found)

    until(look, f"a pod of index {index}")
    return found[0]


def log(space: Space, pod: Body) -> str:
    return space.kubectl("logs", pod["metadata"]["name"], check=False)


def lose(space: Space, index: int) -> Body:
    """Delete the pod of an index, and open the gate of the one that replaces it."""
    lost = pod_of(space, index)
    space.kubectl("delete", f"pod/{lost['metadata']['name']}", "--wait=false")
    new = pod_of(space, index, lambda pod: pod["metadata"]["annotations"][FAILURES] == "1")
    name = new["metadata"]["name"]
    space.wait(f"pod/{name}", "jsonpath={.status.phase}=Running")
    until(lambda: "until the pod before this one has stopped" in log(space, new), "it waits")
    assert "starting round" not in log(space, new)
    space.kubectl("annotate", f"pod/{name}", "--overwrite", f"{names.START}=0/1")
    return new


@pytest.mark.long
def test_a_deleted_pod_is_replaced_alone(space: Space) -> None:
    job_that_replaces_pods(space)
    first = pod_of(space, 0)
    for index in (0, 1):
        until(lambda index=index: "round 0" in log(space, pod_of(space, index)), "round 0")
    second = lose(space, 1)
    for pod in (first, second):
        until(lambda pod=pod: "starting round 1" in log(space, pod), "round 1")
    assert pod_of(space, 0)["metadata"]["uid"] == first["metadata"]["uid"]
    leader = lose(space, 0)
    space.wait("job/train", "condition=Complete")
    status = space.get(JOBS, "train")["status"]
    assert (status["succeeded"], status["failed"]) == (2, 2)
    assert "starting round 2" in log(space, leader)
    assert "starting round 2" in log(space, second)
    ended = {pod["metadata"]["uid"] for pod in items(space, "train")}
    assert {leader["metadata"]["uid"], second["metadata"]["uid"]} <= ended
