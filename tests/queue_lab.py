"""Several jobs of two queues, with a controller that is late or killed."""

import random
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from torchrun_api.kinds.core import Node, Pod
from torchrun_api.kinds.status import TERMINAL, TorchrunJobStatus
from torchrun_controller.reconcile.admission.classify import classify_job, running_gang
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.inputs import ClassifiedJob, cluster_state
from torchrun_controller.reconcile.admission.statuses import JobUpdates, StatusUpdate, queue_updates
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec.admission_status import charged
from world import World, make_job, make_queue

QUOTAS = {"red": 4, "blue": 3}


def pods_of(world: World) -> tuple[Pod, ...]:
    return tuple(o for o in world.objects.values() if isinstance(o, Pod))


class Lab:
    """The worlds of all jobs, their queues, and the coordinator."""

    def __init__(self, chance: random.Random, jobs: int) -> None:
        self.chance = chance
        self.queues = {}
        for name, nodes in QUOTAS.items():
            queue = make_queue(quota={"nodes": nodes}, weight=1)
            meta = replace(queue.metadata, name=name, uid=f"uid-{name}")
            self.queues[name] = replace(queue, metadata=meta)
        self.worlds = [self.world(number) for number in range(jobs)]
        self.preempted: set[str] = set()
        self.nodes: tuple[Node, ...] | None = None

    def world(self, number: int) -> World:
        queue = self.chance.choice(sorted(QUOTAS))
        nodes = self.chance.randint(1, 3)
        job = make_job(
            jobQueue=queue,
            numNodes=nodes,
            priority=self.chance.choice((0, 0, 9)),
            reliability={"maxRestarts": 1},
            **({"elastic": {"minNodes": 1, "maxNodes": 3}} if number % 3 == 0 else {}),
        )
        meta = replace(job.metadata, name=f"job-{number}", uid=f"uid-{number}")
        return World(replace(job, metadata=meta), self.queues[queue])

    def coordinate(
        self, writes: int | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Decide once. A killed process writes only some of its updates.

        `meanwhile` happens between the decision and its writes.
        """
        now = self.worlds[0].now
        entries = []
        for world in self.worlds:
            gangs = world.observed().gang.child_jobs
            queue = self.queues[world.job.spec.job_queue]
            classification = classify_job(world.job, queue, gangs, pods_of(world), frozenset())
            entries.append(ClassifiedJob(world.job, classification))
        decisions = admit(cluster_state(self.queues.values(), entries, (), self.nodes, now), now)
        jobs = JobUpdates(decisions)
        updates = [
            *(jobs.update(entry.job, entry.classification, now) for entry in entries),
            *queue_updates(self.queues.values(), decisions.queues),
        ]
        ordered = sorted((w for w in updates if w is not None), key=lambda update: update.stage)
        meanwhile()
        refused: StatusUpdate | None = None
        for update in ordered[:writes]:
            if refused is not None and update.stage > refused.stage:
                return
            refused = refused if self.write(update) else update
            self.check()

    def write(self, update: StatusUpdate) -> bool:
        """A write with a resourceVersion: refused if the object has changed since."""
        uid, status = update.owner.metadata.uid, update.status
        for name, queue in self.queues.items():
            if queue.metadata.uid == uid:
                self.queues[name] = replace(queue, status=status)
                return True
        for world in self.worlds:
            if world.job is not update.owner:
                continue
            assert isinstance(status, TorchrunJobStatus)
            present = world.job.status
            others = tuple(c for c in present.conditions if c.type != "Admitted")
            merged = replace(
                present,
                conditions=(*others, *status.conditions),
                admission=status.admission,
                queue_position=status.queue_position,
            )
            world.job = replace(world.job, status=merged)
            if any(c.reason == "Preempted" for c in status.conditions):
                self.preempted.add(uid)
            return True
        return False

    def check(self) -> None:
        """Check the quota against charges, running pods and pods in creation."""
        by_charge: Counter[str] = Counter()
        by_gangs: Counter[str] = Counter()
        for world in self.worlds:
            queue = world.job.spec.job_queue
            present = running_gang(world.observed().gang.child_jobs, pods_of(world), frozenset())
            by_charge[queue] += charged(world.job)
            by_gangs[queue] += present.nodes
            assert present.nodes <= charged(world.job), "no gang without its charge"
        for queue, quota in QUOTAS.items():
            assert by_charge[queue] <= quota
            assert by_gangs[queue] <= quota

    def happens(self) -> None:
        """One random event of a job."""
        world = self.chance.choice(self.worlds)
        living = [pod for pod in world.workers() if alive(pod)]
        what = self.chance.randrange(7)
        if what == 0:
            self.start(world)
        elif what == 1:
            self.succeed(world)
        elif what == 2 and living and self.chance.random() < 0.3:
            world.pod(living[0].metadata.name, phase="Failed")
        elif what == 3 and self.chance.random() < 0.3:
            world.spec(suspend=not world.job.spec.suspend)
        elif what == 4 and world.job.spec.elastic is not None:
            world.spec(num_nodes=self.chance.randint(1, 3))
        elif what == 5:
            world.spec(priority=self.chance.choice((0, 0, 9)))
        else:
            world.containers_stop()

    @staticmethod
    def start(world: World) -> None:
        """The kubelets start all pods."""
        for pod in world.workers():
            if pod.status.phase == "Pending":
                world.pod(pod.metadata.name, phase="Running")

    @staticmethod
    def fail(world: World) -> None:
        """The Job controller fails a gang without running pods."""
        phases = [pod.status.phase for pod in world.workers()]
        if "Failed" in phases and not any(alive(pod) for pod in world.workers()):
            world.job_condition("Failed")

    @staticmethod
    def succeed(world: World) -> None:
        """A running gang succeeds."""
        workers = world.workers()
        if workers and world.phase == "Running" and all(alive(pod) for pod in workers):
            world.all_workers("Succeeded")
            world.job_condition("Complete")

    def turn(self) -> None:
        """One event, and possibly a reaction of the controller."""
        self.happens()
        self.check()
        for world in self.chance.sample(self.worlds, 2):
            world.step(self.chance.choice((None, None, None, 0, 1, 9)))
            self.check()
        if self.chance.random() < 0.7:
            self.coordinate(self.chance.choice((None, None, None, 0, 1, 2)))
        for world in self.worlds:
            world.pass_time(seconds=1)

    def finish(self) -> None:
        """Every job that is not suspended is admitted at some time and succeeds."""
        for world in self.worlds:
            world.spec(suspend=False)
        for _ in range(60 * len(self.worlds)):
            self.coordinate()
            for world in self.worlds:
                world.step()
                self.check()
                world.containers_stop()
                self.start(world)
                self.fail(world)
                world.step()
                self.succeed(world)
                world.step()
                self.check()
                world.pass_time(seconds=20)
            ended = all(world.phase in TERMINAL for world in self.worlds)
            if ended and not any(charged(world.job) for world in self.worlds):
                return
        waiting = [(w.phase, w.job.status.message, charged(w.job)) for w in self.worlds]
        raise AssertionError(f"never came to an end: {waiting}")
