"""Random histories of an elastic job whose nodes come and go."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition

from profiles import examples
from torchrun_api.kinds.meta import Condition
from torchrun_controller.reconcile.pods.lifecycle import alive
from unit.reconcile.test_invariants import Histories, happens
from world import World, make_job, make_queue


class ElasticHistories(RuleBasedStateMachine):
    """One elastic job with the invariants of `Histories` and events of its own."""

    react, step, unrecorded = Histories.react, Histories.step, Histories.unrecorded
    at_most_one_gang_trains = Histories.at_most_one_gang_trains
    no_two_gangs_have_one_number = Histories.no_two_gangs_have_one_number
    restarts_are_bounded = Histories.restarts_are_bounded
    every_phase_has_a_reason_and_a_message = Histories.every_phase_has_a_reason_and_a_message
    reconciles_settle_and_every_gang_has_a_cause = (
        Histories.reconciles_settle_and_every_gang_has_a_cause
    )
    sizes_are_within_bounds = Histories.sizes_are_within_bounds

    @initialize(nodes=st.integers(2, 3))
    def submit(self, nodes):
        self.zipped, self.max_restarts, self.user_changes = False, 2, 0
        bounds = {"minNodes": 1, "maxNodes": 3}
        job = make_job(numNodes=nodes, elastic=bounds, reliability={"maxRestarts": 2})
        self.world = World(job, make_queue())
        self.world.settle()

    def pending(self):
        return [pod for pod in self.world.workers() if pod.status.phase == "Pending"]

    @happens(count=st.integers(1, 2), seconds=st.sampled_from([5, 31, 31]))
    def some_workers_are_scheduled(self, count, seconds):
        self.world.containers_stop()
        self.world.settle()
        for pod in self.pending()[:count]:
            self.world.placed(pod.metadata.name)
        self.world.pass_time(seconds=seconds)

    @happens(seconds=st.sampled_from([5, 3601]))
    def gang_runs(self, seconds):
        self.world.containers_stop()
        self.world.settle()
        for pod in self.pending():
            self.world.pod(pod.metadata.name, phase="Running")
        self.world.settle()
        self.world.pass_time(seconds=seconds)

    @precondition(lambda self: self.world.workers())
    @happens(index=st.integers(0, 2))
    def worker_is_lost(self, index):
        workers = self.world.workers()
        pod = workers[index % len(workers)]
        if alive(pod):
            condition = Condition(type="DisruptionTarget", status="True", reason="Drained")
            self.world.pod(pod.metadata.name, phase="Failed", conditions=(condition,))

    @happens()
    def containers_stop(self):
        self.world.containers_stop()

    @happens(nodes=st.sampled_from([2, 3, 3]))
    def user_scales(self, nodes):
        self.user_changes += nodes != self.world.job.spec.num_nodes
        self.world.spec(num_nodes=nodes)


ElasticHistories.TestCase.settings = examples(
    20, stateful_step_count=40, report_multiple_bugs=False
)
TestElasticHistories = ElasticHistories.TestCase
