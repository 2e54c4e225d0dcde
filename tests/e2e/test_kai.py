"""Gangs and queues under the real KAI, on GPU nodes of kwok and on real nodes.

Scheduler and binder run, without the podgrouper: this version does not honour the annotation that
disables it for a pod.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import gpus, rivals
from e2e.cluster import Cluster
from e2e.manifests import job, priority_class
from e2e.space import Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]
NODES = 4
KAI: JsonObject = {"scheduler": "kai-scheduler"}
POD_GROUPS = "podgroups.scheduling.run.ai"
LOW, HIGH = "torchrun-e2e-low", "torchrun-e2e-high"
PRIORITIES = {LOW: 10, HIGH: 90}
"""KAI does not preempt priorities of 100 and more."""
RACK = "torchrun-e2e/rack"


@pytest.fixture(scope="module", autouse=True)
def _kai(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    log = tmp_path_factory.mktemp("kwok") / "log"
    classes = [priority_class(*each) for each in PRIORITIES.items()]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": classes})
    with gpus.installed(cluster, "kai"), gpus.nodes(cluster, NODES, log):
        cluster.kubectl("apply", "-f", "-", stdin=listed)
        yield
        cluster.kubectl("delete", "priorityclass", *PRIORITIES)


def gang(name: str, nodes: int, **spec: object) -> JsonObject:
    return job(name, "gpus", "train", nodes, **spec)


def test_a_gang_that_does_not_fit_gets_no_node_and_smaller_ones_overtake_it(space: Space):
    space.apply(gpus.gpu_queue("gpus", KAI))
    message = f"while {NODES + 1} are required for gang scheduling"
    gpus.assert_smaller_gangs_overtake(space, "gpus", NODES, message)


def test_a_failed_gang_restarts_completely(space: Space):
    space.apply(gpus.gpu_queue("gpus", KAI))
    gpus.assert_a_failed_gang_restarts(space, "gpus", POD_GROUPS, NODES)


def test_the_quota_of_a_queue_is_the_limit_of_its_kai_queue(space: Space, cluster: Cluster):
    quota: JsonObject = {"gpus": 2 * gpus.PER_NODE}
    space.apply(gpus.gpu_queue("gpus", KAI, kaiQueue=space.name, quota=quota))
    wait_kai_queue(space, "gpus", "NotAllowed")  # the quota is a limit, and no guarantee
    # Without a quota of its own, the controller admits its jobs at once.
    space.apply(gpus.gpu_queue("more", KAI, kaiQueue=space.name))
    wait_kai_queue(space, "more", "Shared")
    space.apply(gang("first", 2))
    space.wait_phase("first", "Running")
    with space.history(PODS) as pods:
        space.apply(job("second", "more", "train", 1))
        space.wait_reason("second", "Unschedulable")
        space.wait_message("second", f"{space.name} quota has reached the allowable limit")
        gpus.end(space, "first", "Succeeded")
        space.wait_phase("second", "Running")
        gpus.end(space, "second", "Succeeded")
        space.wait_phase("second", "Succeeded")
        gpus.assert_never_together(pods, "first", "second")
    space.kubectl("delete", "torchrunjobs", "--all")
    space.kubectl("delete", "torchrunqueues", "--all")
    kai_queue = f"queues.scheduling.run.ai/{space.name}"
    assert not cluster.kubectl("get", kai_queue, "--ignore-not-found").stdout


def wait_kai_queue(space: Space, name: str, reason: str) -> None:
    """Wait until the condition KaiQueueReady of a TorchrunQueue has the reason."""
    path = '{.status.conditions[?(@.type=="KaiQueueReady")].reason}'
    space.wait(f"torchrunqueue/{name}", f"jsonpath={path}={reason}")


def test_a_gang_preempted_by_kai_runs_again(space: Space):
    space.apply(gpus.gpu_queue("gpus", KAI))
    with space.history(PODS) as pods:
        space.apply(gang("modest", NODES, scheduling={"priorityClassName": LOW}))
        space.wait_phase("modest", "Running")
        space.apply(gang("urgent", NODES, scheduling={"priorityClassName": HIGH}))
        space.wait_phase("urgent", "Running")
        space.wait("torchrunjob/modest", "jsonpath={.status.attempt}=1")
        gpus.end(space, "urgent", "Succeeded")
        space.wait_phase("urgent", "Succeeded")
        space.wait_phase("modest", "Running")
        gpus.end(space, "modest", "Succeeded")
        status = space.wait_phase("modest", "Succeeded")
        assert [status.get(name, 0) for name in ("restarts", "disruptions")] == [0, 1]
        gpus.assert_never_together(pods, "modest", "urgent")


def test_a_gang_stays_within_the_topology_that_it_requires(space: Space, cluster: Cluster):
    for number in range(NODES):
        rack = f"{RACK}=rack-{number % 2}"
        cluster.kubectl("label", "node", f"fake-gpus-{number}", rack)
    topology = {
        "apiVersion": "kai.scheduler/v1alpha1",
        "kind": "Topology",
        "metadata": {"name": "racks"},
        "spec": {"levels": [{"nodeLabel": RACK}]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(topology))
    in_one_rack: JsonObject = {"topology": {"name": "racks", "required": RACK}}
    with space.history(PODS) as pods:
        space.apply(gpus.gpu_queue("gpus", KAI), gang("wide", 3, scheduling=in_one_rack))
        space.wait_reason("wide", "Unschedulable")
        space.apply(gang("narrow", 2, scheduling=in_one_rack))
        space.wait_phase("narrow", "Running")
        assert not gpus.bound(pods, "wide")
        placed = {
            state["spec"]["nodeName"]
            for state in pods.states()
            if state["metadata"]["name"].startswith("narrow-") and state["spec"].get("nodeName")
        }
    assert placed in ({"fake-gpus-0", "fake-gpus-2"}, {"fake-gpus-1", "fake-gpus-3"})


def test_real_pods_train_under_kai(space: Space, tmp_path: Path):
    gpus.assert_real_pods_train(space, tmp_path, KAI)


def test_a_restart_in_place_keeps_the_nodes_from_a_gang_that_waits(space: Space):
    rivals.apply_queue(space, KAI)
    rivals.assert_a_restart_in_place_keeps_the_nodes(space, "real", "Unschedulable")
