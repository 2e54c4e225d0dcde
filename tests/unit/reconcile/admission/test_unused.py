"""A shrunk elastic gang releases unused nodes to waiting jobs."""

import random

from msgspec.structs import replace

from queue_lab import Lab, pods_of
from queueing import admitted, admitted_workload, decide, node, nodes, queue, request
from torchrun_api.queue import TorchrunQueue
from torchrun_controller.reconcile.admission.classify import running_gang
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world, deliver
from world import World, make_job, make_queue

QUOTA = 4


class Pair(Lab):
    """An elastic job and a later job of the same queue."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 0)
        queue = make_queue(quota={"nodes": QUOTA})
        self.queues: dict[str, TorchrunQueue] = {"gpu": queue}
        self.elastic = World(
            make_job(numNodes=QUOTA, elastic={"minNodes": 1, "maxNodes": 8}), queue
        )
        self.worlds = [self.elastic]

    def submit(self, size: int) -> World:
        job = make_job(numNodes=size)
        meta = replace(job.metadata, name="other", uid="uid-other")
        other = World(replace(job, metadata=meta), self.queues["gpu"])
        self.worlds.append(other)
        other.settle()
        return other

    def check(self) -> None:
        assert sum(charged(world.job) for world in self.worlds) <= QUOTA
        for world in self.worlds:
            gang = running_gang(world.observed().gang.child_jobs, pods_of(world), frozenset())
            assert gang.nodes <= charged(world.job)

    def rounds(self, count: int = 3) -> None:
        """Run the coordinator and the job controller in turn."""
        for _ in range(count):
            self.coordinate()
            for world in self.worlds:
                world.settle()
                self.check()

    def shrink(self) -> World:
        """Only one of four workers is scheduled."""
        world = self.elastic
        world.settle()
        self.rounds(1)
        world.placed(world.workers()[0].metadata.name)
        world.not_placed("0/1 nodes are available: 1 Insufficient cpu.", 1, 2, 3)
        world.settle()
        world.pass_time(seconds=60)
        world.settle()
        world.containers_stop()
        world.placed(world.workers()[0].metadata.name)
        world.all_workers("Running")
        world.settle()
        assert [gang.spec.completions for gang in world.gangs] == [4, 1]
        return world


def test_without_waiting_jobs_a_shrunk_gang_keeps_its_admission():
    pair = Pair()
    world = pair.shrink()
    pair.rounds()
    assert charged(world.job) == 4
    assert world.job.status.admission.limit == 0
    world.pass_time(seconds=600)
    world.settle()
    assert len(world.observed().gang.probes) == 3, "it has probes"


def test_unused_nodes_are_admitted_to_a_waiting_job():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.coordinate()
    assert (charged(world.job), world.job.status.admission.limit) == (4, 1)
    pair.coordinate()
    assert (charged(world.job), charged(other.job)) == (4, 0), "a larger gang may be in creation"
    world.settle()
    assert world.condition("FullSize").reason == "GivesBackNodes"
    pair.coordinate()
    assert (charged(world.job), charged(other.job)) == (1, 3)
    assert world.job.status.admission.limit == 0
    pair.rounds()
    assert world.condition("FullSize").reason == "WaitingForAdmission"
    assert len(other.gangs) == 1
    world.pass_time(seconds=600)
    world.settle()
    assert world.observed().gang.probes == (), "no probes beyond the admission"


def test_a_shrunk_gang_grows_after_the_other_job_has_ended():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.rounds()
    other.all_workers("Succeeded")
    other.job_condition("Complete")
    other.settle()
    pair.rounds()
    assert (charged(world.job), charged(other.job)) == (4, 0)
    world.pass_time(seconds=600)
    world.settle()
    assert len(world.observed().gang.probes) == 3


def test_nothing_is_released_if_it_is_not_enough():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(4)
    pair.rounds()
    assert (charged(world.job), world.job.status.admission.limit) == (4, 0)
    assert charged(other.job) == 0


def test_a_grant_counts_before_the_condition_of_the_release_has_changed():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.coordinate()
    world.settle()
    pair.coordinate()
    assert (charged(world.job), charged(other.job)) == (1, 3)
    assert world.condition("FullSize").reason == "GivesBackNodes"
    admission = replace(world.job.status.admission, nodes=4)
    world.job = replace(world.job, status=replace(world.job.status, admission=admission))
    assert classify_world(world).workload.admitted == 4


def test_a_growing_gang_keeps_its_admission():
    pair = Pair()
    world = pair.shrink()
    world.pass_time(seconds=600)
    world.settle()
    for probe in world.observed().gang.probes:
        world.placed(probe.metadata.name)
    other = pair.submit(3)
    # It has not seen the limit when it creates the larger gang.
    pair.coordinate(meanwhile=lambda: world.step(writes=9))
    pair.rounds()
    assert world.gangs[-1].spec.completions == 4
    assert (charged(world.job), charged(other.job)) == (4, 0)


def test_a_granted_growth_is_not_asked_back_before_the_larger_gang_exists():
    pair = Pair()
    world = pair.elastic
    world.spec(num_nodes=2)
    world.settle()
    pair.rounds(1)
    world.all_workers("Running")
    world.spec(num_nodes=4)
    world.settle()
    pair.coordinate()
    assert charged(world.job) == 4
    other = pair.submit(2)
    pair.coordinate()
    assert world.job.status.admission.limit == 0
    pair.rounds()
    assert (world.gangs[-1].spec.completions, charged(other.job)) == (4, 0)


def test_a_limit_ends_as_soon_as_the_rest_is_released():
    world = Pair().shrink()
    admission = replace(world.job.status.admission, nodes=2, limit=2)
    world.job = replace(world.job, status=replace(world.job.status, admission=admission))
    assert classify_world(world).workload.shrunk_to == 1
    deliver(world)
    assert (charged(world.job), world.job.status.admission.limit) == (2, 0)


def test_a_shrunk_gang_that_gets_its_nodes_again_may_release_them_again():
    """Its new size was requested when the gang was created: it has room for it, or none."""
    pair = Pair()
    world = pair.shrink()
    for _ in range(2):
        other = pair.submit(3)
        pair.rounds()
        assert (charged(world.job), charged(other.job)) == (1, 3)
        other.all_workers("Succeeded")
        other.job_condition("Complete")
        other.settle()
        pair.rounds()
        assert (charged(world.job), charged(other.job)) == (4, 0)
        pair.worlds.remove(other)


def test_a_shrunk_gang_of_a_deleted_job_releases_nothing():
    """Reconcile does not answer for it any more."""
    pair = Pair()
    world = pair.shrink()
    meta = replace(world.job.metadata, deletion_timestamp=world.now)
    world.job = replace(world.job, metadata=meta)
    other = pair.submit(3)
    pair.coordinate()
    assert world.job.status.admission.limit == 0
    assert (charged(world.job), charged(other.job)) == (4, 0)


def test_a_gang_that_fails_after_a_release_keeps_its_smaller_size():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.coordinate()
    world.all_workers("Failed")
    pair.rounds(4)
    assert [gang.spec.completions for gang in world.gangs] == [4, 1, 1]
    assert charged(world.job) + charged(other.job) == 4


SHRUNK = admitted_workload("shrunk", "a", 4, 8, shrunk_to=1, pods_by_node={"n000": 1})


def test_unused_nodes_are_released_before_any_preemption():
    low = admitted_workload("low", "a", 1, 8, admitted_for=1)
    vip = request("vip", "a", 1, 8, priority=9)
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 40})], SHRUNK, low, vip)
    assert [(one.uid, one.nodes) for one in decisions.releases] == [("shrunk", 1)]
    assert decisions.preemptions == ()
    assert decisions.pending["vip"].reason == "InsufficientQuota"


def test_only_as_many_gangs_release_nodes_as_needed():
    other = admitted_workload("other", "a", 4, 8, shrunk_to=2)
    queues = [queue("a", quota={"gpus": 64}), queue("b", quota={"gpus": 64})]
    decisions = decide(None, queues, SHRUNK, other, request("j", "a", 2, 8))
    assert len(decisions.releases) == 1
    leaving = replace(SHRUNK, preempted_for="x")
    decisions = decide(None, queues, leaving, other, request("j", "a", 2, 8))
    assert [one.uid for one in decisions.releases] == ["other"]


def test_no_nodes_are_released_for_a_job_that_waits_for_the_end_of_another():
    queues = [queue("a", quota={"jobs": 1})]
    decisions = decide(nodes(8), queues, SHRUNK, request("j", "a"))
    assert (admitted(decisions), decisions.releases) == ([], ())


def test_a_shrunk_gang_that_asks_for_more_releases_its_unused_nodes():
    pair = Pair()
    world = pair.shrink()
    world.spec(num_nodes=6)
    pair.rounds()
    other = pair.submit(3)
    pair.rounds()
    assert (charged(world.job), charged(other.job)) == (1, 3)
    assert len(other.gangs) == 1


def test_a_job_with_larger_pods_shrinks_after_a_new_admission():
    pair = Pair()
    world = pair.elastic
    world.settle()
    pair.rounds(1)
    world.all_workers("Running")
    world.settle()
    world.queue = pair.queues["gpu"] = make_queue(
        quota={"nodes": QUOTA}, nodeResources={"memory": "32Gi"}
    )
    world.spec(num_nodes=2)
    pair.rounds()
    assert (world.phase, charged(world.job)) == ("Running", 4)
    assert world.job.status.message == (
        "4 of 4 pods are running. The resize to 2 nodes is waiting. The job requests 32Gi of memory"
        " on each node, but was admitted with 0. Admitted for 4 nodes. Suspend and resume the job"
        " to request a new admission."
    )
    other = pair.submit(2)
    world.suspend()
    pair.rounds()
    world.resume()
    pair.rounds()
    assert (charged(world.job), charged(other.job)) == (2, 2)
    assert world.gangs[-1].spec.completions == 2


def released(decisions):
    return [(one.uid, one.nodes) for one in decisions.releases]


def test_only_what_the_head_lacks_is_released():
    cpus = admitted_workload("cpus", "a", 8, 0, admitted_for=9, shrunk_to=1)
    decisions = decide(
        nodes(9), [queue("a", quota={"gpus": 32})], cpus, SHRUNK, request("j", "a", 1, 8)
    )
    assert released(decisions) == [("shrunk", 1)]


def test_a_gang_that_need_not_release_keeps_its_admission():
    """The first is not enough; the next one alone is."""
    large = admitted_workload("large", "a", 4, 8, admitted_for=200, shrunk_to=1)
    small = admitted_workload("small", "a", 2, 8, admitted_for=100, shrunk_to=1)
    queues = [queue("a", quota={"gpus": 48})]
    decisions = decide(nodes(9), queues, small, large, request("j", "a", 3, 8))
    assert released(decisions) == [("large", 1)]
    decisions = decide(nodes(9), queues, small, large, request("j", "a", 4, 8))
    assert released(decisions) == [("large", 1), ("small", 1)]


def test_a_paused_queue_releases_before_any_preemption():
    """It uses two of its two nodes, and has an admission for four."""
    running = [
        admitted_workload("b-1", "b", 3, 8, admitted_for=300, shrunk_to=1),
        admitted_workload("b-2", "b", 1, 8, admitted_for=100),
    ]
    queues = [
        queue("a", quota={"gpus": 16}, cohort="x"),
        queue("b", 0, quota={"gpus": 16}, cohort="x"),
    ]
    decisions = decide(nodes(9), queues, *running, request("a-1", "a", 2, 8))
    assert (released(decisions), decisions.preemptions) == ([("b-1", 1)], ())


FULL = [queue("a", quota={"gpus": 32}), queue("b")]


def test_nothing_is_released_for_a_head_that_lacks_nodes():
    other = admitted_workload("other", "b", 1, 8, pods_by_node={"n001": 1})
    decisions = decide(nodes(2), FULL, SHRUNK, other, request("j", "a", 1, 8))
    assert released(decisions) == []
    assert decisions.pending["j"].reason == "InsufficientQuota"
    assert released(decide(nodes(3), FULL, SHRUNK, other, request("j", "a", 1, 8))) == [
        ("shrunk", 1)
    ]


def test_nodes_of_a_reservation_are_not_free():
    machines = tuple(node(name, labels={"kind": name[0]}) for name in ("x0", "y0", "y1"))
    on_y = {"node_selector": {"kind": "y"}}
    shrunk = replace(SHRUNK, pods_by_node={"x0": 1}, node_selector={"kind": "x"})
    other = admitted_workload("other", "b", pods_by_node={"y0": 1}, seconds_left=60, **on_y)
    job, wide = request("j", "a", **on_y), request("wide", "b", 2, **on_y)
    assert released(decide(machines, FULL, shrunk, other, job)) == [("shrunk", 1)]
    decisions = decide(machines, FULL, shrunk, other, job, wide)
    assert decisions.pending["wide"].reason == "WaitingForNodes"
    assert released(decisions) == []


def test_unused_quota_is_released_for_a_head_that_can_preempt_for_nodes():
    low = admitted_workload("low", "a", 1, 8, admitted_for=1, pods_by_node={"n001": 1})
    vip = request("vip", "a", 1, 8, priority=9)
    queues = [queue("a", quota={"gpus": 40})]
    decisions = decide(nodes(2), queues, SHRUNK, low, vip)
    assert (released(decisions), decisions.preemptions) == ([("shrunk", 1)], ())
    after = replace(SHRUNK, nodes=1, admitted=1, shrunk_to=None, priority=1)
    decisions = decide(nodes(2), queues, after, low, vip)
    assert [one.uid for one in decisions.preemptions] == ["low"]


def test_a_gang_grows_beside_a_head_that_waits_for_the_quota_of_a_shrunk_one():
    grows = admitted_workload("grows", "b", 2, 8, admitted=1, pods_by_node={"n001": 1})
    queues = [queue("a", quota={"gpus": 32}), queue("b", quota={"gpus": 16})]
    decisions = decide(nodes(9), queues, SHRUNK, grows, request("j", "a", 1, 8))
    assert released(decisions) == [("shrunk", 1)]
    assert admitted(decisions) == ["grows"]


def test_the_order_of_the_jobs_changes_no_release():
    gangs = [admitted_workload(name, "a", 4, 8, shrunk_to=2) for name in "xyz"]
    queues, job = [queue("a", quota={"gpus": 96})], request("j", "a", 2, 8)
    assert released(decide(None, queues, *gangs, job)) == released(
        decide(None, queues, *reversed(gangs), job)
    )
