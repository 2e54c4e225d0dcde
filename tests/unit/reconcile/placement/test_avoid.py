"""Nodes with two failed attempts are avoided if there are others."""

import msgspec
import pytest

from torchrun_api.kinds.status import Attempt
from torchrun_controller.reconcile.placement import hostnames, nodes_to_avoid
from world import World, make_job, make_queue

OF_THE_JOB = ("Exception", "ExitCode", "OOMKilled", "Evicted", "PodDeleted")


def attempts(*reasons: str, node: str = "node-1") -> tuple[Attempt, ...]:
    return tuple(Attempt(number=n, node=node, reason=r) for n, r in enumerate(reasons))


@pytest.mark.parametrize(
    ("ended", "nodes"),
    [
        (attempts("NodeLost", "Signaled"), ("node-1",)),
        (attempts("NodeLost"), ()),
        *((attempts(reason, reason), ()) for reason in OF_THE_JOB),
        (attempts("NodeLost", "NodeLost", node=""), ()),
        (attempts("NodeLost") * 2, ()),
    ],
    ids=["twice", "once", *OF_THE_JOB, "nowhere", "the same attempt"],
)
def test_which_nodes_are_avoided(ended, nodes):
    assert nodes_to_avoid(ended) == nodes


def test_the_next_gang_avoids_a_node_that_failed_twice_and_keeps_the_users_affinity():
    own = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]
        },
        "podAntiAffinity": {},
    }
    job = make_job(numNodes=1, scheduling={"affinity": own})
    world = World(job, make_queue())
    world.node("node-1", hostname="machine-1")
    world.settle()
    for _ in range(2):
        world.all_workers("Running")
        world.settle()
        world.pass_time(minutes=20)
        pod = world.workers()[0].metadata.name
        world.end_container(pod, "trainer", exit_code=137, finished_at=world.now)
        plan = world.step()
    status = world.job.status
    assert status.avoided_nodes == ("node-1",)
    assert "preferably not on node-1" in status.message
    spec = msgspec.to_builtins(plan.applies[-1].body)["spec"]["template"]["spec"]
    preferences = spec["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert preferences[0] == {"weight": 1, "preference": {}}
    assert preferences[1]["preference"]["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["machine-1"]}
    ]
    assert spec["affinity"]["podAntiAffinity"] == {}


def test_a_deleted_node_is_avoided_by_its_name():
    world = World(make_job(numNodes=1), make_queue())
    assert hostnames(world.observed().cluster.nodes, ("node-1",)) == ("node-1",)
