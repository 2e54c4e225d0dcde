"""Random histories of a gang whose lost pods are replaced one by one."""

import copy

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from profiles import examples
from torchrun_api.core import Job, Pod
from torchrun_api.kinds import JOBS, PODS
from torchrun_api.meta import Condition
from torchrun_api.status import TERMINAL
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    follows_leader,
    has_own_start,
    index_of,
    predecessors_of,
)
from unit.reconcile.replacing import evict, kill_by_memory, submitted
from world import World

NODES = [f"node-{number}" for number in range(6)]
AN_INDEX = st.integers(0, 3)
A_NODE = st.sampled_from(NODES)


class Cluster:
    """Containers, which run on while their kubelet is silent, and the controllers of Kubernetes.

    running: the pods whose containers run, by UID. started: UIDs of pods that may have started their
    ranks. losses: how many pods something else than the
    controller or its user has ended.
    """

    def __init__(self, nodes: int, max_restarts: int) -> None:
        self.world: World = submitted(nodes, reliability={"maxRestarts": max_restarts})
        for name in NODES:
            self.world.node(name)
        self.running: dict[str, Pod] = {}
        self.started: set[str] = set()
        self.losses = 0

    def pods(self) -> list[Pod]:
        return [pod for key, pod in self.world.objects.items() if key[0] == PODS.plural]

    def schedule(self) -> None:
        """Bind pods to the Ready nodes without another pod."""
        taken = {pod.spec.node_name for pod in self.pods() if alive(pod)}
        free = [name for name in NODES if self.world.is_ready(name) and name not in taken]
        for pod in self.pods():
            if alive(pod) and not pod.spec.node_name and not pod.metadata.terminating and free:
                self.world.place(pod.metadata.name, free.pop(0))

    def kubelets(self) -> None:
        """Every kubelet that is not silent starts pods, and ends those that are deleted."""
        for pod in self.pods():
            if not self.world.is_ready(pod.spec.node_name):
                continue
            if pod.metadata.terminating and not alive(pod):
                continue
            if pod.metadata.terminating or not alive(pod):
                self.running.pop(pod.metadata.uid, None)
            elif pod.spec.node_name and pod.status.phase == "Pending":
                self.running[pod.metadata.uid] = pod
                self.world.pod(pod.metadata.name, phase="Running")
        self.world.containers_stop()
        self.end_unknown()

    def end_unknown(self) -> None:
        """A kubelet that is back ends the containers of pods that have ended in the API."""
        alive_uids = {pod.metadata.uid for pod in self.pods() if alive(pod)}
        for uid, pod in list(self.running.items()):
            if uid not in alive_uids and self.world.is_ready(pod.spec.node_name):
                del self.running[uid]

    def jobs(self) -> None:
        """The Job controller replaces pods, or ends a Job that has reached its limit."""
        self.world.replace_pods()
        jobs = [job for job in self.world.objects.values() if isinstance(job, Job)]
        for child in jobs:
            owned = [p for p in self.pods() if p.metadata.controlled_by(child.metadata.uid)]
            has_failed = any(pod.status.phase == "Failed" for pod in owned)
            if child.spec.backoff_limit or not has_failed or child.status.conditions:
                continue
            failed = Condition(type="Failed", status="True", reason="BackoffLimitExceeded")
            status = replace(child.status, conditions=(failed,))
            self.world.objects[JOBS.plural, child.metadata.name] = replace(child, status=status)
            for pod in owned:
                if alive(pod) and not pod.metadata.terminating:
                    self.world._ending((PODS.plural, pod.metadata.name), 30)

    def go_on(self) -> None:
        self.schedule()
        self.kubelets()
        self.jobs()
        self.world.pass_time(seconds=5)
        self.world.step()

    def training(self) -> list[Pod]:
        """The pods whose containers run, and whose gate or whose leader's gate was opened."""
        pods = self.pods()
        self.started |= {pod.metadata.uid for pod in pods if has_own_start(pod)}
        led = {attempt_of(p) for p in pods if index_of(p) == 0 and p.metadata.uid in self.started}
        self.started |= {p.metadata.uid for p in pods if follows_leader(p) and attempt_of(p) in led}
        return [pod for uid, pod in self.running.items() if uid in self.started]

    def worker(self, index: int) -> Pod | None:
        """A pod of the newest gang whose containers run, on a node that is not silent."""
        workers = self.world.workers()
        pod = workers[index % len(workers)] if workers else None
        if pod is None or pod.metadata.uid not in self.running or pod.metadata.terminating:
            return None
        return pod if alive(pod) and self.world.is_ready(pod.spec.node_name) else None


class Replacements(RuleBasedStateMachine):
    """One job, with a controller that can be late or killed between writes."""

    @initialize(nodes=st.integers(2, 4), max_restarts=st.integers(0, 2))
    def submit(self, nodes, max_restarts):
        self.max_restarts, self.opened = max_restarts, set()
        self.cluster = Cluster(nodes, max_restarts)
        self.world = self.cluster.world
        for _ in range(3):
            self.cluster.go_on()
        assert self.world.phase == "Running"

    @rule(times=st.integers(1, 4))
    def all_goes_on(self, times):
        for _ in range(times):
            self.cluster.go_on()
            self.no_gate_opens_beside_ranks()
            self.the_status_has_the_end_before_a_gate_opens()

    @rule()
    def reconcile(self):
        self.world.step()

    @rule(writes=st.integers(0, 3))
    def killed_in_mid_plan(self, writes):
        self.world.step(writes)

    @rule()
    def pods_are_placed(self):
        self.cluster.schedule()

    @rule()
    def kubelets_work(self):
        self.cluster.kubelets()

    @rule()
    def jobs_are_synced(self):
        self.cluster.jobs()

    @rule(seconds=st.sampled_from([1, 10, 30, 60, 300]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds=seconds)
        self.cluster.end_unknown()

    @rule(index=AN_INDEX)
    def pod_is_deleted(self, index):
        pod = self.cluster.worker(index)
        if pod is not None:
            self.cluster.losses += 1
            self.world._ending((PODS.plural, pod.metadata.name), 30)

    @rule(index=AN_INDEX, by_memory=st.booleans())
    def pod_is_evicted(self, index, by_memory):
        pod = self.cluster.worker(index)
        if pod is not None:
            self.cluster.losses += 1
            position = self.world.workers().index(pod)
            (kill_by_memory if by_memory else evict)(self.world, position)
            del self.cluster.running[pod.metadata.uid]

    @rule(index=AN_INDEX)
    def command_fails(self, index):
        pod = self.cluster.worker(index)
        if pod is not None:
            self.cluster.losses += 1
            end = {"exit_code": 1, "finished_at": self.world.now}
            self.world.end_container(pod.metadata.name, "trainer", **end)
            del self.cluster.running[pod.metadata.uid]

    @rule(name=A_NODE, seconds=st.sampled_from([0, 20, 40]))
    def node_is_silent(self, name, seconds):
        self.cluster.losses += self.world.is_ready(name)
        self.world.node(name, False)
        self.world.pass_time(seconds=seconds)

    @rule(name=A_NODE)
    def node_is_back(self, name):
        self.world.node(name)

    @rule(name=A_NODE)
    def node_is_deleted_and_its_pods_are_collected(self, name):
        self.cluster.losses += 1
        assert self.world.nodes is not None
        self.world.nodes.pop(name, None)
        gone = Condition(type="DisruptionTarget", status="True", reason="DeletionByPodGC")
        for pod in self.cluster.pods():
            if pod.spec.node_name == name and alive(pod):
                self.world.pod(pod.metadata.name, phase="Failed", conditions=(gone,))

    @rule(index=AN_INDEX, by_collector=st.booleans())
    def pod_is_replaced_unseen(self, index, by_collector):
        """Nothing but the new pod shows the loss to the controller. Single rules seldom do this."""
        pod = self.cluster.worker(index)
        if pod is None:
            return
        if by_collector:
            self.node_is_deleted_and_its_pods_are_collected(pod.spec.node_name)
        else:
            self.pod_is_deleted(index)
            self.cluster.kubelets()
        self.world.pass_time(seconds=40)
        self.cluster.jobs()
        self.cluster.schedule()

    @rule(suspend=st.booleans())
    def user_pauses_or_resumes(self, suspend):
        self.world.spec(suspend=suspend)

    @invariant()
    def no_gate_opens_beside_ranks(self):
        """A pod may start only if no ranks of an earlier pod of its place may run."""
        training = self.cluster.training()
        for pod in self.cluster.pods():
            if not alive(pod) or not has_own_start(pod):
                continue
            for earlier in training:
                if attempt_of(earlier) < attempt_of(pod):
                    raise AssertionError(f"{pod.metadata.name} beside {earlier.metadata.name}")
                if attempt_of(earlier) == attempt_of(pod) and index_of(earlier) == index_of(pod):
                    assert predecessors_of(earlier) >= predecessors_of(pod), pod.metadata.name

    @invariant()
    def the_status_has_the_end_before_a_gate_opens(self):
        ends = [end.lost_pod for end in self.world.job.status.attempts if end.lost_pod is not None]
        places = {(end.index, end.replaced) for end in ends}
        for pod in self.cluster.pods():
            if predecessors_of(pod) and has_own_start(pod) and pod.metadata.uid not in self.opened:
                assert (index_of(pod), predecessors_of(pod) - 1) in places
                self.opened.add(pod.metadata.uid)

    @invariant()
    def each_end_counts_once(self):
        status = self.world.job.status
        assert status.restarts <= self.max_restarts
        assert status.restarts + status.disruptions <= self.cluster.losses
        assert len(status.attempts) <= 10

    @invariant()
    def a_waiting_job_has_a_message(self):
        assert self.world.job.status.message

    def teardown(self):
        """After all nodes have returned, the gang runs or the job has ended."""
        if not hasattr(self, "cluster"):
            return
        cluster = copy.deepcopy(self.cluster)
        world = cluster.world
        world.spec(suspend=False)
        for name in NODES:
            world.node(name)
        for _ in range(100):
            cluster.go_on()
            world.pass_time(seconds=25)
        assert world.phase in ("Running", *TERMINAL), world.job.status.message
        alive_pods = [pod for pod in cluster.pods() if alive(pod)]
        assert len(alive_pods) <= (world.job.status.num_nodes or 0), "no pod of an older gang"


Replacements.TestCase.settings = examples(100, stateful_step_count=40, report_multiple_bugs=False)
TestReplacements = Replacements.TestCase


def test_a_pod_that_ran_and_vanished_unseen_with_its_node_is_fenced():
    """The controller sees neither the node of a pod that replaces another one nor that it ran."""
    history = Replacements()
    history.submit(nodes=3, max_restarts=0)
    history.kubelets_work()
    history.killed_in_mid_plan(writes=0)
    history.pod_is_deleted(index=2)
    history.all_goes_on(times=3)
    history.pods_are_placed()
    history.kubelets_work()
    history.pod_is_deleted(index=2)
    history.node_is_deleted_and_its_pods_are_collected(name="node-2")
    history.all_goes_on(times=4)
    history.a_waiting_job_has_a_message()
    history.each_end_counts_once()
    history.teardown()
