"""What a job says of the network that NCCL uses."""

import pytest

from torchrun_api.kinds.status import NetworkUse
from torchrun_controller.reconcile.job.network import CONDITION
from torchrun_controller.reconcile.model.observed import RestartsInPlace
from unit.reconcile.failing import fail
from world import World, make_job, make_queue

IB = NetworkUse(transport="IB", nodes=3)
SOCKET = NetworkUse(transport="Socket", device="eth0", nodes=1, first_node=3)
EFA = NetworkUse(transport="AWS Libfabric", device="efa", nodes=4)
EVERY_SOCKET = NetworkUse(transport="Socket", device="eth0", nodes=4)


def running(restarts: int = 3, **resources: object) -> World:
    """A gang of four nodes that runs, with these further resources of its queue."""
    queue = make_queue(nodeResources={"gpus": 8, "extra": resources})
    world = World(make_job(numNodes=4, reliability={"maxRestarts": restarts}), queue)
    world.settle()
    world.all_workers("Running")
    world.settle()
    return world


def report(world: World, *networks: NetworkUse) -> None:
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put_restarts(("ml", "train"), child, RestartsInPlace(network=networks))


def messages(world: World) -> list[str]:
    return [
        condition.message
        for condition in world.job.status.conditions
        if (condition.type, condition.status) == (CONDITION, "True")
    ]


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ((IB, SOCKET), "Node 3 uses Socket over eth0, the others IB."),
        (
            (NetworkUse(transport="IB", nodes=1, first_node=1), EVERY_SOCKET),
            "4 nodes (the first: node 0) use Socket over eth0, the other IB.",
        ),
        (
            (EFA, NetworkUse(transport="AWS Libfabric", device="tcp", nodes=1, first_node=2)),
            "Node 2 uses AWS Libfabric over tcp, the others AWS Libfabric over efa.",
        ),
        (
            (IB, SOCKET, EFA),
            "NCCL uses Socket over eth0 on node 3, IB on 3 nodes (the first: node 0), AWS Libfabric"
            " over efa on 4 nodes (the first: node 0).",
        ),
    ],
)
def test_nodes_that_differ_are_named(networks: tuple[NetworkUse, ...], message: str) -> None:
    world = running()
    report(world, *networks)
    plan = world.step()
    assert world.job.status.network == networks
    assert (messages(world), world.condition(CONDITION).reason) == ([message], "NetworksDiffer")
    assert [(event.type, event.reason, event.message) for event in plan.events] == [
        ("Warning", "NetworksDiffer", message)
    ]
    assert world.step().events == ()


@pytest.mark.parametrize(
    ("resource", "network"),
    [
        ("rdma/hca_shared_devices_a", EVERY_SOCKET),
        ("vpc.amazonaws.com/efa", EVERY_SOCKET),
        ("vpc.amazonaws.com/efa", NetworkUse(transport="Libfabric", device="tcp;ofi_rxm", nodes=4)),
        ("nvidia.com/hostdev", EVERY_SOCKET),
        ("nvidia.com/roce_gdr", EVERY_SOCKET),
        ("nvidia.com/sriov_rdma_vf", EVERY_SOCKET),
        ("networking.gke.io.networks/rdma-0", EVERY_SOCKET),
    ],
)
def test_tcp_beside_a_requested_device_is_a_fallback(resource: str, network: NetworkUse) -> None:
    world = running(3, **{resource: 1})
    report(world, network)
    world.step()
    used = f"{network.transport} over {network.device}"
    assert messages(world) == [
        f"The pods request {resource}, but NCCL uses {used}. The image may lack the libraries of"
        " the device, or NCCL's plugin for it. NCCL_DEBUG=INFO in spec.env shows what NCCL has"
        " tried."
    ]
    assert world.condition(CONDITION).reason == "FallbackToTCP"


@pytest.mark.parametrize(
    ("resources", "networks"),
    [
        ({}, ()),
        ({}, (EVERY_SOCKET,)),
        ({"example.com/fpga": 1, "networking.gke.io.networks/vpc1": 1}, (EVERY_SOCKET,)),
        ({"rdma/ib": 1}, (IB,)),
        ({"vpc.amazonaws.com/efa": 4}, (EFA,)),
        # Machines whose interfaces have other names.
        ({}, (SOCKET, NetworkUse(transport="Socket", device="ens5", nodes=3))),
    ],
)
def test_what_is_not_certainly_slow_is_no_warning(
    resources: dict[str, object], networks: tuple[NetworkUse, ...]
) -> None:
    world = running(3, **resources)
    report(world, *networks)
    assert world.step().events == ()
    assert (messages(world), world.job.status.network) == ([], networks)


def test_the_network_outlives_the_controllers_memory_but_not_the_attempt() -> None:
    world = running()
    report(world, IB, SOCKET)
    world.step()
    report(world)  # the controller has restarted, or the ranks start again in the same pods
    world.settle()
    assert (world.job.status.network, len(messages(world))) == ((IB, SOCKET), 1)
    fail(world)
    world.settle()
    assert world.job.status.attempt == 1
    assert (world.job.status.network, messages(world)) == ((), [])


def test_a_job_that_has_failed_still_names_its_network() -> None:
    world = running(restarts=0)
    report(world, IB, SOCKET)
    world.step()
    fail(world)
    world.settle()
    assert world.phase == "Failed"
    assert messages(world) == ["Node 3 uses Socket over eth0, the others IB."]
