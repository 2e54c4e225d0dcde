"""Random histories: whatever cluster, user and clock do, what must hold holds."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchrun_api.kinds import JOBS, PODS
from torchrun_api.meta import Condition
from torchrun_controller.reconcile import gang
from torchrun_controller.reconcile.phases import TERMINAL
from torchrun_controller.reconcile.workers import alive
from world import ZIP, World, make_job, make_queue

MAX_RESTARTS = 2


def gangs(world: World) -> int:
    """How many child Jobs were made so far."""
    return sum(plural == JOBS.plural for plural, _ in world.created)


class Histories(RuleBasedStateMachine):
    """One job through everything that may happen to it; a restart is just a reconcile more."""

    @initialize(
        nodes=st.integers(1, 3), zipped=st.booleans(), queue=st.booleans(), setup=st.booleans()
    )
    def submit(self, nodes, zipped, queue, setup):
        spec = {
            "reliability": {"maxRestarts": MAX_RESTARTS, "activeDeadlineSeconds": 7200},
            "elastic": {"minNodes": 1, "maxNodes": 3},
            **({"volumes": ZIP} if zipped else {}),
            **({"setupCommand": "make"} if setup else {}),
        }
        self.zipped = zipped
        self.world = World(make_job(numNodes=nodes, **spec), make_queue() if queue else None)
        self.last_terminal = None
        self.gangs_at_the_end = 0
        self.asked_by_users = 0

    @rule()
    def reconcile(self):
        had_workspace = not self.zipped or any(
            pod.status.phase == "Succeeded" for pod in self.world.observed().sync_pods
        )
        known = any(
            c.type == "WorkspaceReady" and c.status == "True"
            for c in self.world.job.status.conditions
        )
        needs_setup = self.zipped and self.world.job.spec.setup_command
        had_setup = not needs_setup or any(
            pod.status.phase == "Succeeded" for pod in self.world.observed().setup_pods
        )
        plan = self.world.step()
        if any(apply.kind is JOBS for apply in plan.applies):
            assert had_workspace or known, "no gang before its workspace"
            assert had_setup, "no gang before its setup"

    @rule(writes=st.integers(0, 4))
    def killed_in_mid_plan(self, writes):
        """Some objects were written, the status was not; the next process knows only the API."""
        self.world.step(writes)

    @rule(present=st.booleans())
    def queue_comes_or_goes(self, present):
        self.world.queue = make_queue() if present else None

    @rule(seconds=st.sampled_from([0.5, 5, 60, 3600]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds=seconds)

    @rule(seconds=st.sampled_from([-3600, -60, -1, 86_400 * 30]))
    def clock_jumps(self, seconds):
        self.world.pass_time(seconds=seconds)

    @precondition(lambda self: self.world.observed().sync_pods)
    @rule(phase=st.sampled_from(["Running", "Succeeded", "Failed"]))
    def sync_pod_changes(self, phase):
        pod = self.world.observed().sync_pods[-1]
        if pod.status.phase not in ("Succeeded", "Failed"):
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(lambda self: self.world.observed().sync_pods)
    @rule()
    def sync_pod_is_deleted(self):
        name = self.world.observed().sync_pods[-1].metadata.name
        del self.world.objects[PODS.plural, name]

    @precondition(lambda self: self.world.observed().setup_pods)
    @rule(phase=st.sampled_from(["Running", "Succeeded", "Failed"]), own_fault=st.booleans())
    def setup_pod_changes(self, phase, own_fault):
        pod = self.world.observed().setup_pods[-1]
        if not alive(pod):
            return
        if phase == "Failed" and own_fault:
            said = '{"reason": "SetupFailed", "message": "no compiler"}'
            self.world.end_container(pod.metadata.name, "setup", exit_code=2, message=said)
        else:
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(lambda self: self.world.observed().setup_pods)
    @rule()
    def setup_pod_is_deleted(self):
        name = self.world.observed().setup_pods[-1].metadata.name
        del self.world.objects[PODS.plural, name]

    @precondition(lambda self: self.world.workers())
    @rule(index=st.integers(0, 2), phase=st.sampled_from(["Running", "Succeeded", "Failed"]))
    def worker_changes(self, index, phase):
        workers = self.world.workers()
        pod = workers[index % len(workers)]
        if pod.status.phase not in ("Succeeded", "Failed"):
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(
        lambda self: (
            self.world.workers()
            and all(pod.status.phase == "Succeeded" for pod in self.world.workers())
        )
    )
    @rule()
    def job_completes(self):
        self.world.job_condition("Complete")

    @precondition(lambda self: self.world.observed().child_jobs)
    @rule()
    def child_job_is_deleted(self):
        child = self.world.observed().child_jobs[-1]
        self.world._delete(gang.delete(child))
        self.asked_by_users += 1

    @precondition(lambda self: self.world.workers())
    @rule()
    def gang_vanishes_without_a_word(self):
        for pod in self.world.workers():
            del self.world.objects[PODS.plural, pod.metadata.name]
        self.world.job_condition("Failed", "BackoffLimitExceeded")

    @precondition(lambda self: self.world.workers())
    @rule(index=st.integers(0, 2))
    def worker_is_drained(self, index):
        workers = self.world.workers()
        pod = workers[index % len(workers)]
        if alive(pod):
            condition = Condition(type="DisruptionTarget", status="True", reason="Drained")
            self.world.pod(pod.metadata.name, conditions=(condition,))
            self.world._ending((PODS.plural, pod.metadata.name), 30)

    @rule()
    def containers_stop(self):
        self.world.containers_stop()

    @rule(suspend=st.booleans())
    def user_pauses_or_resumes(self, suspend):
        self.asked_by_users += suspend
        self.world.spec(suspend=suspend)

    @rule(nodes=st.integers(1, 3))
    def user_scales(self, nodes):
        self.asked_by_users += 1
        self.world.spec(num_nodes=nodes)

    @invariant()
    def at_most_one_gang_trains(self):
        """A rank trains from its go-ahead until its containers have stopped."""
        training = {
            pod.metadata.labels.attempt
            for key, pod in self.world.objects.items()
            if key[0] == PODS.plural and pod.metadata.annotations.start and alive(pod)
        }
        assert len(training) <= 1

    @invariant()
    def restarts_are_bounded(self):
        status = self.world.job.status
        assert status.restarts <= MAX_RESTARTS
        assert status.running_seconds >= 0
        numbers = [attempt.number for attempt in status.attempts]
        assert numbers == sorted(set(numbers))

    @invariant()
    def one_live_pod_of_each_kind_prepares(self):
        seen = self.world.observed()
        for pods in (seen.sync_pods, seen.setup_pods):
            assert sum(alive(pod) for pod in pods) <= 1

    @invariant()
    def terminal_phases_absorb(self):
        phase = self.world.phase
        if self.last_terminal is not None:
            assert phase == self.last_terminal
            assert gangs(self.world) == self.gangs_at_the_end
        if phase in TERMINAL:
            self.last_terminal = phase
            self.gangs_at_the_end = gangs(self.world)

    @invariant()
    def whoever_waits_says_why(self):
        status = self.world.job.status
        if status.phase is not None:
            assert status.reason
            assert status.message

    @invariant()
    def rest_is_reached_and_every_gang_is_accounted_for(self):
        """Planning again after a rest changes nothing, and no gang came of nothing."""
        world = copy.deepcopy(self.world)
        world.settle()
        status = world.job.status
        assert gangs(world) - 1 <= status.restarts + status.disruptions + self.asked_by_users


Histories.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
TestHistories = Histories.TestCase
