"""Random histories of one job: invariants hold after any event of the cluster, the user or the clock."""

import copy
import functools
from enum import Enum

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from profiles import examples
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.kinds.status import TERMINAL, Attempt
from torchrun_controller.reconcile.gang import gang
from torchrun_controller.reconcile.gang.restarts import INTENDED_ENDS
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import (
    alive,
    attempt_of,
    delete_job,
    follows_leader,
)
from torchrun_controller.reconcile.workspace import delivery
from world import ZIP, World, make_job, make_queue


class Reaction(Enum):
    """How far the controller comes before the next event."""

    NONE_YET = 0
    ONE_RECONCILE = 1
    TO_THE_END = 2
    KILLED_AT_ONCE = 3
    KILLED_AFTER_ONE_WRITE = 4
    KILLED_BEFORE_STATUS = 5
    KILLED_AFTER_TWO_WRITES = 6


KILLED_AFTER = {
    Reaction.KILLED_AT_ONCE: 0,
    Reaction.KILLED_AFTER_ONE_WRITE: 1,
    Reaction.KILLED_AFTER_TWO_WRITES: 2,
    Reaction.KILLED_BEFORE_STATUS: 99,
}


def happens(**drawn):
    """A rule of the machine: an event, and the controller's reaction."""

    def decorate(event):
        @rule(**drawn, reaction=st.sampled_from(Reaction))
        @functools.wraps(event)
        def happening(self, reaction, **values):
            event(self, **values)
            self.react(reaction)

        return happening

    return decorate


def causes(world: World) -> list[str]:
    """The reason for which the attempt before each later gang ended.

    The status wins over the annotation of the next gang, which may have another reason.
    """
    recorded = {attempt.number: attempt.reason for attempt in world.job.status.attempts}
    annotations = (child.metadata.annotations.cause for child in world.gangs)
    ends = [msgspec.json.decode(cause, type=Attempt) for cause in annotations if cause]
    return [recorded.get(end.number, end.reason) for end in ends]


class Histories(RuleBasedStateMachine):
    """All events that one job can meet, with a controller that can be late or killed between writes.

    The next process knows only what the API server stores.
    """

    # UIDs of gangs that were deleted before any status recorded them.
    unrecorded: frozenset[str] = frozenset()

    @initialize(
        nodes=st.integers(1, 3),
        zipped=st.booleans(),
        queue=st.sampled_from([True, True, True, False]),
        setup=st.booleans(),
        max_restarts=st.integers(0, 2),
    )
    def submit(self, nodes, zipped, queue, setup, max_restarts):
        self.max_restarts = max_restarts
        spec = {
            "reliability": {"maxRestarts": max_restarts, "activeDeadlineSeconds": 7200},
            "elastic": {"minNodes": 1, "maxNodes": 3},
            **({"volumes": ZIP} if zipped else {}),
            **({"setupCommand": "make"} if setup else {}),
        }
        self.zipped = zipped
        self.world = World(make_job(numNodes=nodes, **spec), make_queue() if queue else None)
        self.last_terminal = None
        self.gangs_at_the_end = 0
        self.user_changes = 0

    def react(self, reaction: Reaction):
        """Let the controller react. A kill leaves some objects written, and no status."""
        if reaction is Reaction.NONE_YET:
            return
        if reaction is Reaction.TO_THE_END:
            self.world.settle()
        else:
            self.step(KILLED_AFTER.get(reaction))

    def step(self, writes):
        pods = self.world.observed().workspace.sync_pods
        served = any(delivery.is_serve_pod(pod) and delivery.is_serving(pod) for pod in pods)
        had_workspace = not self.zipped or any(pod.status.phase == "Succeeded" for pod in pods)
        was_ready = any(
            c.type == "WorkspaceReady" and c.status == "True"
            for c in self.world.job.status.conditions
        )
        needs_setup = self.zipped and self.world.job.spec.setup_command
        had_setup = not needs_setup or any(
            pod.status.phase == "Succeeded" for pod in self.world.observed().workspace.setup_pods
        )
        plan = self.world.step(writes)
        for child_job in (apply for apply in plan.applies if apply.kind is JOBS):
            if "TORCHRUN_WORKSPACE_URL" in str(child_job.body):
                assert served, "a gang that downloads has a serve pod"
                continue
            assert had_workspace or was_ready, "no gang before its workspace"
            assert had_setup, "no gang before its setup"
            claims = self.world.observed().workspace.claims
            assert not self.zipped or claims[0].status.phase != "Pending", "no gang without a claim"

    @happens()
    def nothing(self):
        """An event that does not concern the job."""

    @happens(present=st.sampled_from([True, True, False]))
    def queue_comes_or_goes(self, present):
        self.world.queue = make_queue() if present else None

    @happens(seconds=st.sampled_from([0.5, 5, 60, 3600]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds=seconds)

    @happens(seconds=st.sampled_from([-3600, -60, -1, 86_400 * 30]))
    def clock_jumps(self, seconds):
        self.world.pass_time(seconds=seconds)

    @precondition(lambda self: self.world.observed().workspace.sync_pods)
    @happens(phase=st.sampled_from(["Running", "Succeeded", "Succeeded", "Failed"]))
    def sync_pod_changes(self, phase):
        pod = self.world.observed().workspace.sync_pods[-1]
        if not alive(pod):
            return
        if phase != "Failed" and pod.metadata.annotations.delivery != "ephemeral":
            if not self.world.observed().workspace.claims:
                return
            self.world.claim_is("Bound")
        if phase == "Succeeded" and delivery.is_serve_pod(pod):
            self.world.serves()
        else:
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(lambda self: self.world.observed().workspace.claims)
    @happens()
    def claim_waits(self):
        if self.world.observed().workspace.claims[0].status.phase != "Bound":
            self.world.claim_is("Pending")

    @precondition(lambda self: self.world.observed().workspace.sync_pods)
    @happens()
    def sync_pod_is_deleted(self):
        name = self.world.observed().workspace.sync_pods[-1].metadata.name
        del self.world.objects[PODS.plural, name]

    @precondition(lambda self: self.world.observed().workspace.setup_pods)
    @happens(
        phase=st.sampled_from(["Running", "Succeeded", "Succeeded", "Failed"]),
        own_fault=st.booleans(),
    )
    def setup_pod_changes(self, phase, own_fault):
        pod = self.world.observed().workspace.setup_pods[-1]
        if not alive(pod):
            return
        if phase == "Failed" and own_fault:
            message = '{"reason": "SetupFailed", "message": "no compiler"}'
            self.world.end_container(pod.metadata.name, "setup", exit_code=2, message=message)
        else:
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(lambda self: self.world.observed().workspace.setup_pods)
    @happens()
    def setup_pod_is_deleted(self):
        name = self.world.observed().workspace.setup_pods[-1].metadata.name
        del self.world.objects[PODS.plural, name]

    @precondition(lambda self: self.world.workers())
    @happens(
        index=st.integers(0, 2), phase=st.sampled_from(["Running", "Succeeded", "Failed", "Failed"])
    )
    def worker_changes(self, index, phase):
        workers = self.world.workers()
        pod = workers[index % len(workers)]
        if pod.status.phase not in ("Succeeded", "Failed"):
            self.world.pod(pod.metadata.name, phase=phase)

    @precondition(lambda self: self.world.workers())
    @happens(phase=st.sampled_from(["Running", "Running", "Succeeded"]))
    def whole_gang_runs_or_succeeds(self, phase):
        """All pods at once. With one event for each pod, few histories would get this far."""
        for pod in self.world.workers():
            if alive(pod):
                self.world.pod(pod.metadata.name, phase=phase)
        if all(pod.status.phase == "Succeeded" for pod in self.world.workers()):
            self.world.job_condition("Complete")

    @precondition(lambda self: self.world.observed().gang.child_jobs)
    @happens()
    def child_job_is_deleted(self):
        observed = self.world.observed()
        self.forget_unrecorded(observed)
        self.world._delete(delete_job(observed.gang.current_job))
        self.user_changes += 1

    def forget_unrecorded(self, observed):
        """Note the gangs whose numbers may be used again, because no object will mention them.

        Once its pods have ended, that is a gang that no status recorded, and the gang before it if a
        resize deleted that one.
        """
        if not gang.is_recorded(observed.job, observed.gang):
            status = self.world.job.status
            recorded = -1 if status.workers is None else status.attempt
            gangs = (child for child in self.world.gangs if attempt_of(child) > recorded)
            self.unrecorded |= {child.metadata.uid for child in gangs}

    @precondition(lambda self: self.world.workers())
    @happens()
    def gang_is_force_deleted(self):
        for pod in self.world.workers():
            del self.world.objects[PODS.plural, pod.metadata.name]
        self.world.job_condition("Failed", "BackoffLimitExceeded")

    @precondition(lambda self: self.world.workers())
    @happens(index=st.integers(0, 2))
    def worker_is_drained(self, index):
        workers = self.world.workers()
        pod = workers[index % len(workers)]
        if alive(pod):
            self.world.drain(pod.metadata.name)

    @happens()
    def containers_stop(self):
        self.world.containers_stop()

    @happens(suspend=st.sampled_from([True, False, False]))
    def user_pauses_or_resumes(self, suspend):
        self.user_changes += suspend
        self.world.spec(suspend=suspend)

    @happens(nodes=st.integers(1, 3))
    def user_scales(self, nodes):
        self.user_changes += 1
        self.world.spec(num_nodes=nodes)

    @invariant()
    def at_most_one_gang_trains(self):
        """A rank trains from its go-ahead until its containers have stopped."""
        pods = [pod for key, pod in self.world.objects.items() if key[0] == PODS.plural]
        started = {pod.metadata.labels.attempt for pod in pods if pod.metadata.annotations.start}
        training = {
            pod.metadata.labels.attempt
            for pod in pods
            if alive(pod)
            and (pod.metadata.annotations.start or follows_leader(pod))
            and pod.metadata.labels.attempt in started
        }
        assert len(training) <= 1

    @invariant()
    def no_two_gangs_have_one_number(self):
        recorded = [
            child for child in self.world.gangs if child.metadata.uid not in self.unrecorded
        ]
        numbers = [attempt_of(child) for child in recorded]
        assert len(numbers) == len(set(numbers)), numbers

    @invariant()
    def restarts_are_bounded(self):
        status = self.world.job.status
        assert status.restarts <= self.max_restarts
        assert status.running_seconds >= 0
        numbers = [attempt.number for attempt in status.attempts]
        assert numbers == sorted(set(numbers))

    @invariant()
    def one_sync_and_one_setup_pod_run_at_once(self):
        """A serve pod that has its content may run until its successor replaces it."""
        workspace = self.world.observed().workspace
        assert sum(alive(pod) for pod in workspace.setup_pods) <= 1
        before = [pod for pod in workspace.sync_pods if alive(pod)][:-1]
        assert all(delivery.is_serve_pod(pod) and delivery.has_content(pod) for pod in before)

    @invariant()
    def terminal_phases_are_final(self):
        phase = self.world.phase
        if self.last_terminal is not None:
            assert phase == self.last_terminal
            assert len(self.world.gangs) == self.gangs_at_the_end
        if phase in TERMINAL:
            self.last_terminal = phase
            self.gangs_at_the_end = len(self.world.gangs)

    @invariant()
    def every_phase_has_a_reason_and_a_message(self):
        status = self.world.job.status
        if status.phase is not None:
            assert status.reason
            assert status.message

    @invariant()
    def reconciles_settle_and_every_gang_has_a_cause(self):
        """Reconciles come to an end, and a failure, a resize or the user caused each new gang."""
        world = copy.deepcopy(self.world)
        world.settle()
        status, reasons = world.job.status, causes(world)
        resized = sum(reason in gang.RESIZES for reason in reasons)
        counted = status.restarts + status.disruptions
        gangs, completed = world.gangs, gang.find_completed_job(world.observed().gang)
        if completed is not None:
            # Once a Job has completed, the status does not count gangs with higher numbers.
            gangs = [child for child in gangs if attempt_of(child) <= attempt_of(completed)]
        assert len(gangs) - 1 <= counted + resized + self.user_changes
        ends = [a.reason for a in status.attempts if a.number == status.attempt]
        pending = sum(reason not in INTENDED_ENDS for reason in ends)  # their gangs come later
        assert counted <= len(reasons) - resized + pending, "no end of a gang counts twice"
        self.sizes_are_within_bounds(world)

    def sizes_are_within_bounds(self, world):
        observed = world.observed()
        if gang.exists(observed.job, observed.gang):
            assert 1 <= head_and_workers.nodes_of(observed.gang.current_job) <= 3


Histories.TestCase.settings = examples(60, stateful_step_count=50, report_multiple_bugs=False)
TestHistories = Histories.TestCase
