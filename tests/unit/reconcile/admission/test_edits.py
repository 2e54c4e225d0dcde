"""Quotas hold while requests of jobs and queues are edited at any time."""

import random
from collections import Counter
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from queue_lab import Lab, pods_of
from torchrun_api import names
from torchrun_api.kinds.job import JobNodeResources
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.shared import PodTemplate
from torchrun_api.kinds.status import TERMINAL
from torchrun_controller.reconcile.pods.lifecycle import alive
from torchrun_controller.reconcile.spec.admission_status import charged, granted_requests
from world import World, make_job, make_queue

GPU = "nvidia.com/gpu"
# The quota of a queue: nodes and GPUs.
QUOTAS = {"red": (6, 8), "blue": (3, 4)}
SIZES = (0, 1, 2, 4)


def queue_with(name: str, gpus: int) -> TorchrunQueue:
    nodes, most = QUOTAS[name]
    queue = make_queue(
        quota={"nodes": nodes, "gpus": most}, weight=1, nodeResources={"gpus": gpus, "cpus": 8}
    )
    return replace(queue, metadata=replace(queue.metadata, name=name, uid=f"uid-{name}"))


def running_gpus(world: World) -> tuple[int, int]:
    """Pods and GPUs of the largest gang with live pods, counted from the requests of the pods."""
    by_gang: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for pod in pods_of(world):
        owner = pod.metadata.owner_references[0].uid
        template: Any = world.templates.get(owner)
        if template is None or pod.metadata.labels.component != names.WORKER or not alive(pod):
            continue
        by_gang[owner] += 1
        for container in template["spec"]["containers"]:
            requests = container.get("resources", {}).get("limits", {})
            gpus[owner] += int(requests.get(GPU, 0))
    return max(by_gang.values(), default=0), max(gpus.values(), default=0)


class EditedLab(Lab):
    """Users edit requests, sizes and queues of jobs, and an administrator edits queues."""

    def __init__(self, chance: random.Random, jobs: int) -> None:
        super().__init__(chance, 0)
        self.queues = {name: queue_with(name, 4) for name in QUOTAS}
        self.worlds = [self.world(number) for number in range(jobs)]

    def world(self, number: int) -> World:
        queue = self.chance.choice(sorted(QUOTAS))
        job = make_job(
            jobQueue=queue,
            numNodes=self.chance.randint(1, 3),
            nodeResources={"gpus": self.chance.choice((0, 1))},
            reliability={"maxRestarts": 3},
            **({"elastic": {"minNodes": 1, "maxNodes": 3}} if number % 3 == 0 else {}),
        )
        meta = replace(job.metadata, name=f"job-{number}", uid=f"uid-{number}")
        return World(replace(job, metadata=meta), self.queues[queue])

    def check(self) -> None:
        charges: Counter[str] = Counter()
        runs: Counter[str] = Counter()
        for world in self.worlds:
            queue, granted = world.job.spec.job_queue, granted_requests(world.job)
            pods, gpus = running_gpus(world)
            runs[queue, "nodes"] += pods
            runs[queue, "gpus"] += gpus
            if granted is None:
                assert pods == 0, "no gang without its charge"
                continue
            assert world.job.status.admission.queue == queue
            charges[queue, "nodes"] += granted.nodes
            charges[queue, "gpus"] += granted.nodes * granted.gpus
            assert pods <= granted.nodes
            assert gpus <= granted.nodes * granted.gpus
        for name, (nodes, gpus) in QUOTAS.items():
            assert charges[name, "nodes"] <= nodes
            assert charges[name, "gpus"] <= gpus
            assert runs[name, "nodes"] <= nodes
            assert runs[name, "gpus"] <= gpus

    def edit(self) -> None:
        """Edits that the CRD allows to users, and any edit of an administrator."""
        world = self.chance.choice(self.worlds)
        fixed = world.job.status.workers is not None or charged(world.job) > 0
        what = self.chance.randrange(6)
        if what <= 1:
            world.spec(node_resources=JobNodeResources(gpus=self.chance.choice(SIZES)))
        elif what == 2 and (world.job.spec.elastic is not None or not fixed):
            world.spec(num_nodes=self.chance.randint(1, 3))
        elif what == 3 and not fixed:
            world.spec(job_queue=self.chance.choice(sorted(QUOTAS)))
        elif what == 4:
            beside = {"name": "beside", "resources": {"limits": {GPU: self.chance.choice(SIZES)}}}
            containers = self.chance.choice(([], [], [beside]))
            world.spec(pod_template=PodTemplate(spec={"containers": containers}))
        elif what == 5:
            name = self.chance.choice(sorted(QUOTAS))
            gpus = self.chance.choice((2, 4))
            edited = queue_with(name, gpus)
            self.queues[name] = replace(edited, status=self.queues[name].status)

    def meanwhile(self) -> None:
        """Edits between a decision and its writes, with or without reconciles."""
        for _ in range(self.chance.randrange(3)):
            self.edit()
            self.look(self.chance.choice(self.worlds))
            self.check()

    def look(self, world: World) -> None:
        if self.chance.random() < 0.8:
            world.queue = self.queues[world.job.spec.job_queue]
        if world.queue is None or world.queue.metadata.name != world.job.spec.job_queue:
            world.queue = self.queues[world.job.spec.job_queue]
        world.step(self.chance.choice((None, None, None, 0, 1, 9)))

    def schedule(self, world: World) -> None:
        """Schedule some pods of an elastic gang."""
        for pod in [pod for pod in world.workers() if pod.status.phase == "Pending"]:
            if self.chance.random() < 0.6:
                world.placed(pod.metadata.name)
            else:
                world.not_placed("no node", pod=pod.metadata.name)

    def turn(self) -> None:
        self.happens()
        self.edit()
        elastic = [world for world in self.worlds if world.job.spec.elastic is not None]
        if elastic and self.chance.random() < 0.5:
            self.schedule(self.chance.choice(elastic))
        if self.chance.random() < 0.1:
            world = self.chance.choice(self.worlds)
            if world.observed().gang.child_jobs:
                world.delete_child_job()
        for world in self.worlds:
            self.fail(world) if self.chance.random() < 0.3 else None
        for world in self.chance.sample(self.worlds, 2):
            self.look(world)
            self.check()
        if self.chance.random() < 0.7:
            self.coordinate(self.chance.choice((None, None, None, 0, 1, 2)), self.meanwhile)
        for world in self.worlds:
            world.pass_time(seconds=self.chance.choice((1, 1, 60, 400)))

    def finish(self) -> None:
        """When all requests fit their quotas, every job is admitted at some time."""
        for name in QUOTAS:
            self.queues[name] = replace(queue_with(name, 4), status=self.queues[name].status)
        for world in self.worlds:
            world.queue = self.queues[world.job.spec.job_queue]
            world.spec(node_resources=JobNodeResources(gpus=1), pod_template=PodTemplate())
        super().finish()


# A history is a seed, because shrinking a history would take minutes.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_charges_and_pods_never_exceed_the_quota_during_edits(seed):
    lab = EditedLab(random.Random(seed), jobs=5)
    for _ in range(40):
        lab.turn()
    lab.finish()
    assert all(world.phase in TERMINAL for world in lab.worlds)
