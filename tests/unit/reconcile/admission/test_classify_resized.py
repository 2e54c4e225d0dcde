"""An admitted job whose spec or queue requests more than was admitted."""

from msgspec.structs import replace

from admitting import QUOTA, running, submitted
from torchrun_api.kinds.admission import AdmittedHead
from torchrun_api.kinds.job import JobNodeResources
from torchrun_controller.reconcile.admission.model import (
    Grant,
)
from torchrun_controller.reconcile.admission.statuses import (
    Stage,
)
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world, deliver, status_update
from world import World, make_queue

EIGHT_GPUS = {"quota": {"gpus": 8}, "nodeResources": {"gpus": 8}}


class TestOtherRequests:
    """The spec or the nodes of the queue request more than was admitted."""

    def outdated(self) -> World:
        world = running(EIGHT_GPUS, numNodes=4, nodeResources={"gpus": 0})
        world.spec(node_resources=JobNodeResources(gpus=8))
        world.settle()
        return world

    def test_a_running_gang_keeps_the_admitted_charge(self):
        world = self.outdated()
        classifications = classify_world(world)
        assert (
            classifications.workload.admitted,
            classifications.workload.nodes,
            classifications.workload.gpus,
        ) == (4, 4, 0)
        assert classifications.workload.queue == "gpu"
        assert classifications.outdated == ""
        assert status_update(world) is None

    def test_an_outdated_admission_is_withdrawn(self):
        world = self.outdated()
        world.delete_child_job()
        assert classify_world(world).outdated == "", "the status does not say that the job waits"
        world.settle()
        assert deliver(world) is Stage.REPORT
        assert world.condition("Admitted").reason == "AdmissionOutdated"
        assert "The job requests 8 GPUs on each node, but was admitted with 0." in (
            world.condition("Admitted").message
        )
        assert charged(world.job) == 4, "a fitting gang may be in creation"
        assert classify_world(world).requeued is False
        world.settle()
        requeued = classify_world(world)
        assert (requeued.requeued, requeued.takes_part) == (True, True)
        assert deliver(world) is Stage.RELEASE
        world.settle()
        request = classify_world(world).workload
        assert (request.admitted, request.nodes, request.gpus) == (0, 4, 8)

    def test_a_reverted_edit_loses_no_gang(self):
        """The admission is withdrawn while reconcile creates a gang that fits again."""
        world = running(EIGHT_GPUS, numNodes=1, nodeResources={})
        world.queue = make_queue(quota={"gpus": 8}, nodeResources={"gpus": 16})
        world.delete_child_job()
        world.settle()
        withdraws = status_update(world)
        world.queue = make_queue(**EIGHT_GPUS)
        world.step(writes=9)
        assert len(world.gangs) == 2
        world.job = replace(
            world.job,
            status=replace(
                world.job.status,
                admission=withdraws.status.admission,
                conditions=withdraws.status.conditions,
            ),
        )
        world.settle()
        assert charged(world.job) == 1
        assert classify_world(world).requeued is False
        assert deliver(world) is Stage.REPORT
        assert world.condition("Admitted").status == "True"

    def test_larger_pods_are_no_growth(self):
        world = running(
            {"quota": {"nodes": 8}, "nodeResources": {"gpus": 8}},
            nodeResources={"gpus": 4},
            elastic={"minNodes": 1, "maxNodes": 4},
        )
        world.spec(num_nodes=4, node_resources=JobNodeResources(gpus=8))
        assert classify_world(world).workload.nodes == 2
        world.spec(num_nodes=4, node_resources=JobNodeResources(gpus=2))
        request = classify_world(world).workload
        assert (request.nodes, request.gpus) == (4, 4)

    def test_only_an_elastic_gang_grows(self):
        """The same number of GPUs on smaller nodes needs more nodes."""
        queue = {"quota": {"nodes": 8}, "nodeResources": {"gpus": 8}}
        world = submitted(queue, numNodes=None, numGPUs=16)
        world.admit(2)
        world.queue = make_queue(quota={"nodes": 8}, nodeResources={"gpus": 4})
        assert classify_world(world).workload.nodes == 2

    def test_granted_growth_needs_no_new_admission(self):
        world = running(elastic={"minNodes": 1, "maxNodes": 4})
        world.spec(num_nodes=4, elastic=replace(world.job.spec.elastic, min_nodes=3))
        world.delete_child_job()
        world.settle()
        assert classify_world(world).outdated == "The job requests 4 nodes."
        deliver(world, grants=(Grant(uid="uid-train", nodes=4),))
        assert world.condition("Admitted").status == "True"
        world.settle()
        assert [gang.spec.completions for gang in world.gangs] == [2, 4]

    def test_the_record_has_the_requests_of_the_head(self):
        head = {"nodeResources": {"gpus": 0, "cpus": "500m", "memory": "1Gi"}}
        node = {"gpus": 8, "cpus": 96, "memory": "512Gi"}
        world = submitted({**QUOTA, "nodeResources": node}, numNodes=3, head=head)
        before = classify_world(world).workload
        deliver(world, grants=(Grant(uid="uid-train", nodes=3),))
        admission = world.job.status.admission
        assert admission.requests == {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": 8}
        assert admission.head == AdmittedHead(requests={"cpu": "500m", "memory": "1Gi"})
        after = classify_world(world).workload
        assert (after.pod, after.head, after.head_gpus) == (before.pod, before.head, 0)
        world.settle()
        assert len(world.gangs) == 1

    def test_an_invalid_record_is_ignored(self):
        world = running()
        admission = replace(world.job.status.admission, requests={"cpu": "lots"})
        world.job = replace(world.job, status=replace(world.job.status, admission=admission))
        assert classify_world(world).workload.admitted == 2
