"""The processes behind the API of a `World`: kubelets, containers and launchers.

Containers keep running while their kubelet is silent. Launchers behave like torchrun_runtime.launch
at its slowest: a gang that reads a newer epoch has killed its ranks after 10 s, a gang that reads
nothing after 41 s, and a new gang waits 45 s.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.meta import ChildAnnotations, Condition
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_controller.reconcile.pods.lifecycle import alive, follows_leader
from torchrun_runtime.launch.podinfo import workers_in
from world import World

SUPERSEDED = timedelta(seconds=10)
SILENT = timedelta(seconds=41)
WAIT = timedelta(seconds=45)
CLEARING = timedelta(seconds=55)  # until a returned kubelet kills unknown pods
TICK = timedelta(seconds=2.5)
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class State(Enum):
    """The state of a launcher."""

    GATE = "waits at the gate"
    FENCING = "waits out the fence"
    TRAINS = "trains"
    DEAD = "is dead"


@dataclass
class Process:
    """One launcher. start, fence: the annotations that it can read.

    synced: the annotations that the kubelet has written; missed: that write was lost.
    """

    pod: Pod
    attempt: int
    index: int
    node: str
    start: str
    fence: str
    synced: ChildAnnotations
    missed: bool = False
    state: State = State.GATE
    since: datetime | None = None
    good: datetime | None = None
    newer: datetime | None = None
    reason: str = ""


@dataclass
class Machine:
    """A node. kubelet: is working; storage: is reachable; back: when the node returned."""

    kubelet: bool = True
    storage: bool = True
    back: datetime | None = None


@dataclass
class Machines:
    """All machines and processes, and the shared state directory, if any.

    busy: kubelets miss new annotations of a pod, but never of two patches in a row.
    """

    world: World
    shares_state: bool
    busy: bool = False
    nodes: dict[str, Machine] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    epoch: int = -1
    passed: int = -1
    signed: set[tuple[int, int]] = field(default_factory=set)

    def add(self, name: str) -> None:
        """A node joins."""
        self.nodes[name] = Machine()
        self.world.node(name)

    def training(self) -> set[int]:
        """Attempts with a rank that runs now."""
        return {p.attempt for p in self.processes.values() if p.state is State.TRAINS}

    def story(self) -> str:
        """The state of all processes, for failure messages."""
        job = self.world.job.status
        job_line = f"{self.world.now:%H:%M:%S} {job.phase} {job.reason} {job.unfenced}"
        runs = (
            f"{p.attempt}-{p.index} on {p.node} {p.state.value} {p.fence} {p.reason}"
            for p in self.processes.values()
        )
        return "\n".join((job_line, *runs))

    # Faults

    def lose(self, name: str, storage: bool) -> None:
        """The kubelet sends no more heartbeats; the containers keep running."""
        self.nodes[name] = Machine(kubelet=False, storage=storage)
        self.world.node(name, False)

    def come_back(self, name: str) -> None:
        """The kubelet and its Node object return. Does nothing if the kubelet was never away.

        A kubelet restart that the API does not show would only delay the cleanup.
        """
        if self.nodes[name].kubelet:
            return
        self.nodes[name] = Machine(back=self.world.now)
        self.world.node(name)
        self._see(name, misses=False)

    def forget(self, name: str) -> None:
        """The Node object is deleted, and its pods vanish from the API."""
        assert self.world.nodes is not None
        del self.world.nodes[name]
        self.drop_pods(name)

    def collect(self, name: str) -> None:
        """The Node object is deleted, and the pod garbage collector sets its pods to Failed.

        The pods stay until the Job controller has counted them.
        """
        assert self.world.nodes is not None
        del self.world.nodes[name]
        gone = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
        for pod in list(self.world.objects.values()):
            if isinstance(pod, Pod) and pod.spec.node_name == name and alive(pod):
                self.world.pod(pod.metadata.name, phase="Failed", conditions=(gone,))

    def drop_pods(self, name: str) -> None:
        """The node's pods are deleted by force."""
        for key, pod in list(self.world.objects.items()):
            if isinstance(pod, Pod) and pod.spec.node_name == name:
                del self.world.objects[key]

    def power_off(self, name: str) -> None:
        """An administrator switches the machine off and taints the node out-of-service."""
        for process in self.processes.values():
            if process.node == name:
                process.state = State.DEAD
        self.nodes[name] = Machine(kubelet=False, storage=False)
        self.world.node(name, False, OUT_OF_SERVICE)

    # Controllers

    def schedule(self) -> None:
        """Bind pods to the Ready node with the fewest pods. Sync pods succeed at once."""
        pods = [o for o in self.world.objects.values() if isinstance(o, Pod)]
        for pod in pods:
            if not pod.spec.node_name and pod.metadata.deletion_timestamp is not None:
                del self.world.objects[PODS.plural, pod.metadata.name]  # as the API server does
                continue
            if (
                pod.spec.node_name
                or pod.metadata.deletion_timestamp
                or pod.status.phase not in ("", "Pending")
            ):
                continue
            ready = [name for name in self.nodes if self.world.is_ready(name)]
            if ready:
                bound = [
                    p.spec.node_name for p in self.world.objects.values() if isinstance(p, Pod)
                ]
                self.world.place(pod.metadata.name, min(ready, key=bound.count))
                if pod.metadata.labels.component == names.SYNC:
                    self.world.pod(pod.metadata.name, phase="Succeeded")

    def jobs(self) -> None:
        """The Job controller fails a Job with a failed or missing pod, and deletes its pods."""
        pods = [o for o in self.world.objects.values() if isinstance(o, Pod)]
        for child in self.world.observed().gang.child_jobs:
            mine = [pod for pod in pods if pod.metadata.controlled_by(child.metadata.uid)]
            whole = len(mine) == child.spec.completions and all(alive(pod) for pod in mine)
            if not whole and not child.status.conditions:
                failed = Condition(type="Failed", status="True", reason="BackoffLimitExceeded")
                status = replace(child.status, conditions=(failed,))
                key = (JOBS.plural, child.metadata.name)
                self.world.objects[key] = replace(child, status=status)
                for pod in mine:
                    if alive(pod) and pod.metadata.deletion_timestamp is None:
                        self.world._ending((PODS.plural, pod.metadata.name), 30)

    def kubelets(self, *names: str) -> None:
        """Every working kubelet, or those of these nodes, syncs its pods once."""
        for name in names or self.nodes:
            if self.nodes[name].kubelet and self.world.is_ready(name):
                self._kubelet(name)

    def _kubelet(self, name: str) -> None:
        recorded = set()
        for key, pod in list(self.world.objects.items()):
            if not isinstance(pod, Pod) or pod.spec.node_name != name:
                continue
            uid = pod.metadata.uid
            recorded.add(uid)
            process = self.processes.get(uid)
            ends = pod.metadata.deletion_timestamp
            if ends is not None:
                if process is not None and process.state is State.TRAINS and self.world.now < ends:
                    continue  # its ranks use their whole grace period
                if process is not None:
                    process.state = State.DEAD
                del self.world.objects[key]
            elif process is not None and pod.status.phase == "Failed":
                process.state = State.DEAD  # the kubelet kills a pod that has failed in the API
            elif process is None and pod.status.phase == "Pending":
                labels, annotations = pod.metadata.labels, pod.metadata.annotations
                numbers = int(labels.attempt), int(labels.completion_index)
                self.processes[uid] = Process(
                    pod, *numbers, name, annotations.start, annotations.fence, annotations
                )
                self.world.pod(key[1], phase="Running")
            elif process is not None:
                self._update(process, pod)
        back = self.nodes[name].back
        if back is None or self.world.now - back >= CLEARING:
            for uid, process in self.processes.items():
                if process.node == name and uid not in recorded:
                    process.state = State.DEAD

    def _update(self, process: Process, pod: Pod) -> None:
        self._bring(process, pod.metadata.annotations, self.busy)
        if process.state is State.DEAD and pod.status.phase == "Running":
            message = f'{{"exitCode": 125, "reason": "{process.reason}", "message": "m"}}'
            self.world.end_container(
                pod.metadata.name,
                "trainer",
                exit_code=125,
                message=message if process.reason else "",
                finished_at=self.world.now,
            )

    def _see(self, name: str, *, misses: bool) -> None:
        """A working kubelet sees the writes before time passes."""
        for pod in self.world.objects.values():
            if isinstance(pod, Pod) and pod.spec.node_name == name:
                process = self.processes.get(pod.metadata.uid)
                if process is not None:
                    self._bring(process, pod.metadata.annotations, misses)

    def _bring(self, process: Process, annotations: ChildAnnotations, misses: bool) -> None:
        if annotations == process.synced:
            return
        process.synced = annotations
        process.missed = misses and not process.missed
        if not process.missed:
            process.start, process.fence = annotations.start, annotations.fence

    def pass_time(self, seconds: float) -> None:
        """Time passes, and launchers run."""
        for name, machine in self.nodes.items():
            if machine.kubelet:
                self._see(name, misses=self.busy)
        end = self.world.now + timedelta(seconds=seconds)
        while self.world.now < end:
            self.world.now = min(self.world.now + TICK, end)
            for process in self.processes.values():
                self._launch(process)
            for name, machine in self.nodes.items():
                if machine.kubelet and machine.back and self.world.now - machine.back >= CLEARING:
                    self._kubelet(name)

    def _launch(self, process: Process) -> None:
        now, machine = self.world.now, self.nodes[process.node]
        if process.state is State.GATE and self._may_begin(process):
            self._begin(process, machine.storage)
        if not self.shares_state or process.state not in (State.FENCING, State.TRAINS):
            return
        assert process.good is not None
        if machine.storage and process.newer is None:
            if self.epoch > process.attempt:
                process.newer = now
            else:
                process.good = now
        too_new = process.newer is not None and now - process.newer >= SUPERSEDED
        if too_new or now - process.good >= SILENT:
            process.state, process.reason = State.DEAD, "Fenced"
        elif process.state is State.FENCING and process.since and now - process.since >= WAIT:
            process.state, self.passed = State.TRAINS, max(self.passed, process.attempt)

    def _may_begin(self, process: Process) -> bool:
        """Whether its own annotation permits it, or the start of its leader."""
        if process.start == str(process.attempt):
            return True
        return follows_leader(process.pod) and any(
            other.attempt == process.attempt and other.index == 0 and other.state is State.TRAINS
            for other in self.processes.values()
        )

    def _begin(self, process: Process, storage: bool) -> None:
        unfenced = workers_in(process.fence)
        if not self.shares_state:
            assert not unfenced, "launchers cannot fence without a state directory"
            process.state = State.TRAINS
            return
        alive = [worker for worker in unfenced if worker.attempt >= self.passed]
        if not storage or self.epoch > process.attempt:
            process.state, process.reason = State.DEAD, "Fenced"
        elif not self.signed.issuperset(alive):
            process.state, process.reason = State.DEAD, "FenceUnproven"
        else:
            self.epoch = process.attempt
            self.signed.add((process.attempt, process.index))
            process.good = process.since = self.world.now
            process.state = State.FENCING if alive else State.TRAINS
            self.passed = self.passed if alive else max(self.passed, process.attempt)
