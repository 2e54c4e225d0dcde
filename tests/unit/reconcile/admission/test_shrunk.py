"""What a shrunk elastic gang is charged: what its pods request, at once."""

import random
from datetime import timedelta

import pytest
from msgspec.structs import replace

from queue_lab import Lab, pods_of
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_controller.reconcile.admission.classify import running_gang
from torchrun_controller.reconcile.spec.admission_status import charged
from world import World, make_job, make_queue

QUOTA = 4


class Pair(Lab):
    """An elastic job, and a later job of the same queue."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 0)
        queue = make_queue(quota={"nodes": QUOTA})
        self.queues: dict[str, TorchrunQueue] = {"gpu": queue}
        job = make_job(numNodes=QUOTA, elastic={"minNodes": 1, "maxNodes": 8})
        self.elastic = World(job, queue)
        self.worlds = [self.elastic]

    def submit(self, size: int) -> World:
        job = make_job(numNodes=size)
        meta = replace(job.metadata, name="other", uid="uid-other")
        other = World(replace(job, metadata=meta), self.queues["gpu"])
        other.now = self.elastic.now
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

    def place_one(self) -> None:
        """Only one worker is scheduled, and a gang of that size follows."""
        world = self.elastic
        world.placed(world.workers()[0].metadata.name)
        for index in range(1, len(world.workers())):
            world.not_placed("0/1 nodes are available: 1 Insufficient cpu.", index)
        world.settle()
        world.pass_time(seconds=60)
        world.settle()

    def shrink(self) -> World:
        """A gang of one node runs, of four."""
        world = self.elastic
        world.settle()
        self.rounds(1)
        self.place_one()
        self.run()
        assert [gang.spec.completions for gang in world.gangs] == [4, 1]
        return world

    def run(self) -> None:
        """The pods of older gangs stop, and those of the present one run."""
        world = self.elastic
        world.containers_stop()
        world.settle()
        world.all_workers("Running")
        world.settle()

    def fail(self) -> None:
        """A worker of the gang fails, and the next gang is created."""
        world = self.elastic
        world.pod(world.workers()[0].metadata.name, phase="Failed")
        world.settle()
        self.run()


def test_the_charge_is_reduced_once_no_pod_of_the_larger_gang_is_left():
    pair = Pair()
    world = pair.elastic
    world.settle()
    pair.rounds(1)
    world.all_workers("Running")
    world.settle()
    world.drain(world.workers()[3].metadata.name)
    world.containers_stop()
    world.settle()
    pair.place_one()
    assert world.gangs[-1].spec.completions == 1
    pair.coordinate()
    assert charged(world.job) == 3, "so many pods of the larger gang still run"
    world.containers_stop()
    world.settle()
    pair.coordinate()
    assert charged(world.job) == 1


def test_another_job_gets_the_quota_that_the_gang_does_not_use():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.rounds()
    assert (charged(world.job), charged(other.job)) == (1, 3)
    assert len(other.gangs) == 1
    assert (world.phase, world.job.status.reason) == ("Running", "Shrunk")
    assert world.condition("Admitted").message == "Admitted for 1 node."


def test_a_shrunk_gang_asks_for_no_more_within_the_hour():
    pair = Pair()
    world = pair.shrink()
    pair.rounds()
    world.pass_time(minutes=50)
    pair.fail()
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (1, 1)


def test_a_gang_after_the_hour_starts_at_once_and_asks_for_the_rest():
    pair = Pair()
    world = pair.shrink()
    other = pair.submit(3)
    pair.rounds()
    world.pass_time(hours=1)
    pair.rounds()
    assert charged(world.job) == 1, "a gang that runs asks for nothing"
    pair.fail()
    pair.rounds()
    assert (world.phase, charged(world.job), world.job.status.num_nodes) == ("Running", 1, 1)
    assert world.condition("FullSize").reason == "WaitingForAdmission"
    assert world.condition("Admitted").message.startswith("Admitted for 1 of 4 nodes.")
    other.all_workers("Succeeded")
    other.job_condition("Complete")
    other.settle()
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (4, 4)


def test_a_resumed_job_asks_for_all_nodes():
    pair = Pair()
    world = pair.shrink()
    pair.rounds()
    world.suspend()
    pair.rounds()
    assert charged(world.job) == 0
    world.resume()
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (4, 4)


def test_a_preempted_job_asks_for_all_nodes():
    pair = Pair()
    world = pair.shrink()
    pair.rounds()
    urgent = make_job(numNodes=4, priority=9)
    meta = replace(urgent.metadata, name="urgent", uid="uid-urgent")
    other = World(replace(urgent, metadata=meta), pair.queues["gpu"])
    pair.worlds.append(other)
    other.settle()
    pair.rounds()
    world.containers_stop()
    pair.rounds()
    assert (charged(world.job), charged(other.job)) == (0, 4)
    other.all_workers("Succeeded")
    other.job_condition("Complete")
    other.settle()
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (4, 4)


def test_a_shrunk_gang_that_is_scaled_gets_the_new_size_once_it_is_admitted():
    pair = Pair()
    world = pair.shrink()
    pair.rounds()
    world.spec(num_nodes=3)
    world.settle()
    assert world.job.status.num_nodes == 1
    assert world.condition("FullSize").reason == "WaitingForAdmission"
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (3, 3)


def test_a_gang_that_shrinks_further_is_charged_less():
    pair = Pair()
    world = pair.shrink()
    world.spec(num_nodes=3)
    pair.rounds()
    pair.run()
    pair.fail()
    assert charged(world.job) == 3
    pair.place_one()
    pair.run()
    pair.rounds()
    assert (charged(world.job), world.job.status.num_nodes) == (1, 1)


@pytest.mark.parametrize("late", [False, True])
def test_a_gang_is_no_larger_than_the_last_one_while_its_charge_may_be_reduced(late: bool):
    """The coordinator has decided to reduce the charge, and has not written that yet."""
    pair = Pair()
    world = pair.shrink()
    (end,) = world.job.status.attempts
    world.now = end.end_time + timedelta(minutes=60 if late else 1)
    world.pod(world.workers()[0].metadata.name, phase="Failed")

    def create_gang() -> None:
        world.step(writes=9)

    pair.coordinate(meanwhile=create_gang)
    assert world.gangs[-1].spec.completions == 1
    pair.rounds()


def test_a_gang_that_is_larger_than_its_charge_is_charged():
    """Its Job was deleted and replaced while the coordinator reduced the charge."""
    pair = Pair()
    world = pair.shrink()
    world.settle()
    pair.coordinate()
    assert charged(world.job) == 1
    world.admit(4)
    world.delete_child_job()
    world.settle()
    assert world.gangs[-1].spec.completions == 4
    world.admit(1)
    pair.coordinate()
    assert charged(world.job) == 4
