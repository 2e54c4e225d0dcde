"""Random histories of nodes: two gangs never train at the same time."""

import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from profiles import examples
from torchrun_api.kinds.status import TERMINAL
from unit.reconcile.machines import Machines, State
from world import ZIP, World, make_job, make_queue

NODES = [f"node-{number}" for number in range(4)]
A_NODE = st.sampled_from(NODES)
A_DEATH = st.sampled_from([None, 1, 2])
"""Writes after which the process is killed."""


class NodeHistories(RuleBasedStateMachine):
    """One job on four machines, with or without a shared state directory."""

    @initialize(workers=st.integers(1, 3), zipped=st.booleans(), busy=st.booleans())
    def submit(self, workers, zipped, busy):
        spec = {"volumes": ZIP} if zipped else {}
        self.world = World(make_job(numNodes=workers, **spec), make_queue())
        self.machines = Machines(self.world, zipped, busy)
        for name in NODES:
            self.machines.add(name)
        if zipped:
            self.world.step()
            self.world.sync_done()
        self.world.settle()
        for _ in range(3):
            self.go_on()

    def go_on(self):
        """Run each controller, kubelet and launcher once."""
        self.machines.schedule()
        self.machines.kubelets()
        self.machines.jobs()
        self.machines.pass_time(2.5)
        self.world.step()

    @rule()
    def all_goes_on(self):
        self.go_on()

    @rule()
    def reconcile(self):
        self.world.step()

    @rule(writes=st.integers(0, 3))
    def killed_in_mid_plan(self, writes):
        self.world.step(writes)

    @rule()
    def kubelets_work(self):
        self.machines.kubelets()

    @rule(name=A_NODE)
    def a_kubelet_is_faster_than_others(self, name):
        self.machines.kubelets(name)

    @rule()
    def jobs_are_counted(self):
        self.machines.jobs()

    @rule()
    def pods_are_placed(self):
        self.machines.schedule()

    @rule(seconds=st.sampled_from([2.5, 10, 40, 60, 600]))
    def time_passes(self, seconds):
        self.machines.pass_time(seconds)

    @rule(name=A_NODE, storage=st.booleans())
    def node_is_lost(self, name, storage):
        self.machines.lose(name, storage)

    @rule(name=A_NODE, storage=st.booleans())
    def gang_is_replaced(self, name, storage):
        """A node is lost and the gang replaced. Single rules seldom reach this."""
        self.machines.lose(name, storage)
        self.machines.pass_time(40)
        for _ in range(4):
            self.go_on()

    @rule(name=A_NODE)
    def node_is_back(self, name):
        self.machines.come_back(name)

    def record_loss(self, writes):
        """The loss is recorded in the status, or only in the Job of the next gang."""
        gangs = len(self.world.gangs)
        if writes is not None:
            self.world.step(writes)
        if len(self.world.gangs) == gangs:
            self.world.settle()

    @rule(name=A_NODE, writes=A_DEATH)
    def node_is_deleted(self, name, writes):
        """Its pods count as lost before: the garbage collector waits 40 s."""
        if name in (self.world.nodes or {}):
            self.machines.lose(name, True)
            self.machines.pass_time(40)
            self.record_loss(writes)
            self.machines.forget(name)

    @rule(name=A_NODE, writes=A_DEATH, back=st.booleans())
    def node_is_deleted_and_the_collector_is_first(self, name, writes, back):
        if name in (self.world.nodes or {}):
            self.machines.lose(name, True)
            self.machines.collect(name)
            if back:
                self.machines.come_back(name)
            self.record_loss(writes)
            self.machines.drop_pods(name)

    @rule(name=A_NODE, writes=A_DEATH, seconds=st.sampled_from([0, 10, 40]))
    def pods_of_a_lost_node_are_deleted_by_force(self, name, writes, seconds):
        """Possible as soon as the node is NotReady, before it counts as lost."""
        if not self.machines.nodes[name].kubelet:
            self.machines.pass_time(seconds)
            self.record_loss(writes)
            self.machines.drop_pods(name)

    @rule(name=A_NODE, seconds=st.sampled_from([0, 30, 50, 60]))
    def node_is_back_when_its_pods_are_gone(self, name, seconds):
        """A node is lost, replaced, its pods force-deleted, and it returns with running ranks."""
        self.gang_is_replaced(name, True)
        self.machines.drop_pods(name)
        self.go_on()
        self.machines.come_back(name)
        self.machines.pass_time(seconds)
        for _ in range(3):
            self.go_on()

    @rule(name=A_NODE)
    def node_is_switched_off(self, name):
        self.machines.power_off(name)

    @rule(suspend=st.booleans())
    def user_pauses_or_resumes(self, suspend):
        self.world.spec(suspend=suspend)

    @invariant()
    def one_gang_trains(self):
        assert len(self.machines.training()) <= 1, self.machines.story()

    @invariant()
    def a_waiting_job_has_a_message(self):
        if self.world.phase in ("Pending", "Queued"):
            assert self.world.job.status.message

    def teardown(self):
        """After all nodes have returned or are off, nothing blocks the gang."""
        if not hasattr(self, "machines"):
            return
        machines = copy.deepcopy(self.machines)
        world = machines.world
        world.spec(suspend=False)
        for name in NODES:
            machines.come_back(name)
        for _ in range(60):
            machines.schedule()
            machines.kubelets()
            machines.jobs()
            machines.pass_time(30)
            world.step()
            assert len(machines.training()) <= 1, machines.story()
        states = {machines.processes[p.metadata.uid].state for p in world.workers()}
        going = (world.phase, states) == ("Running", {State.TRAINS})
        assert world.phase in TERMINAL or going, machines.story()


NodeHistories.TestCase.settings = examples(100, stateful_step_count=30, report_multiple_bugs=False)
TestNodeHistories = NodeHistories.TestCase


@pytest.mark.parametrize("paused", [True, False])
def test_workers_of_a_deleted_node_are_recorded_before_their_gang_is_released(paused):
    """Otherwise a crash between the delete of the Job and the status would lose them."""
    history = NodeHistories()
    history.submit(workers=1, zipped=False, busy=False)
    if paused:
        history.user_pauses_or_resumes(suspend=True)
    else:
        history.world.admit(1)
        history.world.settle()
        history.world.preempt()
    history.node_is_deleted_and_the_collector_is_first("node-0", writes=1, back=False)
    (unfenced,) = history.world.job.status.unfenced
    assert unfenced.node == "node-0"
    history.user_pauses_or_resumes(suspend=False)
    history.world.admit(1)
    for _ in range(3):
        history.go_on()
        history.one_gang_trains()
    assert history.world.job.status.reason == "WaitingForFence"
