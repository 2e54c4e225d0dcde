"""Lost pods of a gang are replaced alone: real pods, real torch, and the controller's decisions."""

from typing import Any

import pytest

from bodies import Body
from e2e.manifests import job, queue
from e2e.space import Space, until
from torchrun_api import names
from torchrun_api.kinds import EVENTS, JOBS, PODS

# Each round is whole: all ranks find each other. The ranks of the last one end.
SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
name = os.environ["TORCHRUN_ATTEMPT"] + "." + os.environ["TORCHRUN_ROUND"]
print("round", name, "has", int(ranks), "ranks", flush=True)
if name != "0.2":
    time.sleep(1000)
dist.destroy_process_group()
"""
NODES = 3


def pods(space: Space) -> dict[int, Body]:
    """The newest worker of each node."""
    selector = f"{names.JOB_LABEL}=train,{names.COMPONENT_LABEL}={names.WORKER}"
    listed: dict[str, Any] = space.api.get(
        PODS.path(space.name), params={"labelSelector": selector}
    ).json()

    def age(pod: Body) -> int:
        return int(pod["metadata"]["annotations"][names.FAILURE_COUNT])

    ordered = sorted(listed["items"], key=age)
    return {int(pod["metadata"]["labels"][names.COMPLETION_INDEX_LABEL]): pod for pod in ordered}


def uids(space: Space) -> dict[int, str]:
    return {index: pod["metadata"]["uid"] for index, pod in pods(space).items()}


def await_round(space: Space, number: int) -> None:
    """Wait until every rank has met all others in this round of the first gang."""
    line = f"round 0.{number} has {NODES} ranks"

    def is_whole() -> bool:
        names_of_pods = [pod["metadata"]["name"] for pod in pods(space).values()]
        logs = [space.kubectl("logs", name, check=False) for name in names_of_pods]
        return len(logs) == NODES and all(line in log for log in logs)

    until(is_whole, line)


def evict(space: Space, pod: str) -> None:
    """Evict a pod by the API, as a drain does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    space.api.post(f"{PODS.path(space.name, pod)}/eviction", json=body).raise_for_status()


@pytest.mark.long
def test_lost_pods_are_replaced_and_the_others_stay(space: Space) -> None:
    resources = {"cpus": "250m", "memory": "1000Mi"}
    workspace = {"workspace": {"enabled": False}}
    torch = queue("torch", space.cluster.trainer, nodeResources=resources, storage=workspace)
    reliability = {"podReplacement": "Pod"}
    command = ["python3", "-c", SCRIPT]
    spec = {"launcher": "torchrun", "reliability": reliability}
    space.apply(torch, job("train", "torch", command, NODES, **spec))
    await_round(space, 0)
    first = uids(space)
    space.kubectl("delete", "pod", pods(space)[1]["metadata"]["name"], "--wait=false")
    await_round(space, 1)
    second = uids(space)
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1] != first[1]
    (end,) = space.status("train")["attempts"]
    assert (end["reason"], end["lostPod"]["uid"]) == ("PodDeleted", first[1])
    evict(space, pods(space)[0]["metadata"]["name"])
    status = space.wait_phase("train", "Succeeded")
    third = uids(space)
    assert (third[1], third[2]) == (second[1], first[2])
    assert third[0] != first[0]
    counts = [status.get(name, 0) for name in ("attempt", "restarts", "disruptions")]
    assert counts == [0, 0, 2]
    ends = [(end["reason"], end["lostPod"]["uid"]) for end in status["attempts"]]
    assert ends == [("PodDeleted", first[1]), ("EvictionByEvictionAPI", first[0])]
    assert status["workers"]["succeeded"] == NODES
    (child,) = space.api.get(JOBS.path(space.name)).json()["items"]
    assert child["metadata"]["name"] == "train", "no gang has followed"
    check_reports(space)


def check_reports(space: Space) -> None:
    """The events and the plugin name both losses."""
    until(lambda: len(losses(space)) == 2, "an event for each lost pod")
    shown = space.cluster.kubectl("torchrun", "status", "train", "-n", space.name).stdout
    print(shown)
    for index in (1, 0):
        assert f"attempt 0, pod of index {index}" in shown


def losses(space: Space) -> list[Body]:
    events: list[Body] = space.api.get(EVENTS.path(space.name)).json()["items"]
    return [event for event in events if event["reason"] == "PodLost"]
