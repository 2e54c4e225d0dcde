"""Random histories: whatever cluster, user and clock do, what must hold holds."""

import copy
import functools
from enum import Enum

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from profiles import examples
from torchrun_api.kinds import JOBS, PODS
from torchrun_api.meta import Condition
from torchrun_api.status import TERMINAL, Attempt
from torchrun_controller.reconcile.gang import gang
from torchrun_controller.reconcile.gang.restarts import NO_FAILURES
from torchrun_controller.reconcile.pods import head_and_workers
from torchrun_controller.reconcile.pods.lifecycle import alive, attempt_of, delete_job
from torchrun_controller.reconcile.workspace import delivery
from world import ZIP, World, make_job, make_queue


class Reaction(Enum):
    """How far the controller comes before the next thing happens."""

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
    """The reason of the end that each later gang follows.

    An end that the status has recorded stays, even if the next gang was created for another reason.
    """
    recorded = {attempt.number: attempt.reason for attempt in world.job.status.attempts}
    annotations = (child.metadata.annotations.cause for child in world.gangs)
    ends = [msgspec.json.decode(cause, type=Attempt) for cause in annotations if cause]
    return [recorded.get(end.number, end.reason) for end in ends]


class Histories(RuleBasedStateMachine):
    """One job through everything that may happen to it, with a controller that is now and then late or
    killed in the middle of its writes: the next process knows only what the API holds.
    """

    unrecorded: frozenset[str] = (
        frozenset()
    )  # UIDs of gangs that went before any status told of them

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
        self.asked_by_users = 0

    def react(self, reaction: Reaction):
        """What the controller does about it: a kill leaves objects written and no status."""
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
        known = any(
            c.type == "WorkspaceReady" and c.status == "True"
            for c in self.world.job.status.conditions
        )
        needs_setup = self.zipped and self.world.job.spec.setup_command
        had_setup = not needs_setup or any(
            pod.status.phase == "Succeeded" for pod in self.world.observed().workspace.setup_pods
        )
        plan = self.world.step(writes)
        for made in (apply for apply in plan.applies if apply.kind is JOBS):
            if "TORCHRUN_WORKSPACE_URL" in str(made.body):
                assert served, "no gang that nobody serves"
                continue
            assert had_workspace or known, "no gang before its workspace"
            assert had_setup, "no gang before its setup"
            claims = self.world.observed().workspace.claims
            assert not self.zipped or claims[0].status.phase != "Pending", "no gang without a claim"

    @happens()
    def nothing(self):
        """Something that is none of the job's business."""

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
            said = '{"reason": "SetupFailed", "message": "no compiler"}'
            self.world.end_container(pod.metadata.name, "setup", exit_code=2, message=said)
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
        """In one go: change by change few histories would come so far."""
        for pod in self.world.workers():
            if alive(pod):
                self.world.pod(pod.metadata.name, phase=phase)
        if all(pod.status.phase == "Succeeded" for pod in self.world.workers()):
            self.world.job_condition("Complete")

    @precondition(lambda self: self.world.observed().gang.child_jobs)
    @happens()
    def child_job_is_deleted(self):
        seen = self.world.observed()
        child = seen.gang.current_job
        self.forget_untold(seen)
        self.world._delete(delete_job(child))
        self.asked_by_users += 1

    def forget_untold(self, seen):
        """Once its pods have ended, nothing in the API tells of a gang that no status knew.

        Nor of the one before it, which a resize has deleted. Their numbers are free again.
        """
        if not gang.is_recorded(seen.job, seen.gang):
            status = self.world.job.status
            known = -1 if status.workers is None else status.attempt
            gangs = (child for child in self.world.gangs if attempt_of(child) > known)
            self.unrecorded |= {child.metadata.uid for child in gangs}

    @precondition(lambda self: self.world.workers())
    @happens()
    def gang_vanishes_without_a_word(self):
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
        self.asked_by_users += suspend
        self.world.spec(suspend=suspend)

    @happens(nodes=st.integers(1, 3))
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
    def no_two_gangs_have_one_number(self):
        told = [child for child in self.world.gangs if child.metadata.uid not in self.unrecorded]
        numbers = [attempt_of(child) for child in told]
        assert len(numbers) == len(set(numbers)), numbers

    @invariant()
    def restarts_are_bounded(self):
        status = self.world.job.status
        assert status.restarts <= self.max_restarts
        assert status.running_seconds >= 0
        numbers = [attempt.number for attempt in status.attempts]
        assert numbers == sorted(set(numbers))

    @invariant()
    def one_live_pod_of_each_kind_prepares(self):
        """Beside its successor lives only a serve pod that holds what it made."""
        seen = self.world.observed()
        assert sum(alive(pod) for pod in seen.workspace.setup_pods) <= 1
        before = [pod for pod in seen.workspace.sync_pods if alive(pod)][:-1]
        assert all(delivery.is_serve_pod(pod) and delivery.has_content(pod) for pod in before)

    @invariant()
    def terminal_phases_absorb(self):
        phase = self.world.phase
        if self.last_terminal is not None:
            assert phase == self.last_terminal
            assert len(self.world.gangs) == self.gangs_at_the_end
        if phase in TERMINAL:
            self.last_terminal = phase
            self.gangs_at_the_end = len(self.world.gangs)

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
        status, made = world.job.status, causes(world)
        resized = sum(reason in gang.RESIZES for reason in made)
        counted = status.restarts + status.disruptions
        gangs, completed = world.gangs, gang.find_completed_job(world.observed().gang)
        if completed is not None:
            # Later gangs are not in the status once the Job of an earlier one has completed.
            gangs = [child for child in gangs if attempt_of(child) <= attempt_of(completed)]
        assert len(gangs) - 1 <= counted + resized + self.asked_by_users
        ends = [a.reason for a in status.attempts if a.number == status.attempt]
        pending = sum(reason not in NO_FAILURES for reason in ends)  # their gangs are yet to come
        assert counted <= len(made) - resized + pending, "no end of a gang counts twice"
        self.sizes_are_within_bounds(world)

    def sizes_are_within_bounds(self, world):
        """At rest, probes ask for no more than what is missing, and only beside a gang."""
        seen, missing = world.observed(), 0
        if gang.exists(seen.job, seen.gang):
            present = head_and_workers.nodes_of(seen.gang.current_job)
            assert 1 <= present <= 3
            missing = max(0, world.job.spec.num_nodes - present)
        assert len(seen.gang.probes) <= (missing if world.phase == "Running" else 0)


class Capacities(RuleBasedStateMachine):
    """An elastic job where nodes come and go, again and again."""

    react, step, unrecorded = Histories.react, Histories.step, Histories.unrecorded
    at_most_one_gang_trains = Histories.at_most_one_gang_trains
    no_two_gangs_have_one_number = Histories.no_two_gangs_have_one_number
    restarts_are_bounded = Histories.restarts_are_bounded
    whoever_waits_says_why = Histories.whoever_waits_says_why
    at_rest = Histories.rest_is_reached_and_every_gang_is_accounted_for
    sizes_are_within_bounds = Histories.sizes_are_within_bounds

    @initialize(nodes=st.integers(2, 3))
    def submit(self, nodes):
        self.zipped, self.max_restarts, self.asked_by_users = False, 2, 0
        bounds = {"minNodes": 1, "maxNodes": 3}
        job = make_job(numNodes=nodes, elastic=bounds, reliability={"maxRestarts": 2})
        self.world = World(job, make_queue())
        self.world.settle()

    def pending(self):
        return [pod for pod in self.world.workers() if pod.status.phase == "Pending"]

    @happens(count=st.integers(1, 2), seconds=st.sampled_from([5, 31, 31]))
    def only_some_find_a_node(self, count, seconds):
        self.world.containers_stop()
        self.world.settle()
        for pod in self.pending()[:count]:
            self.world.placed(pod.metadata.name)
        self.world.pass_time(seconds=seconds)

    @happens(seconds=st.sampled_from([5, 301, 301]))
    def gang_runs(self, seconds):
        self.world.containers_stop()
        self.world.settle()
        for pod in self.pending():
            self.world.pod(pod.metadata.name, phase="Running")
        self.world.settle()
        self.world.pass_time(seconds=seconds)

    @precondition(lambda self: self.world.observed().gang.probes)
    @happens(index=st.integers(0, 1), seconds=st.sampled_from([1, 11]))
    def probe_finds_room(self, index, seconds):
        probes = self.world.observed().gang.probes
        self.world.placed(probes[index % len(probes)].metadata.name)
        self.world.pass_time(seconds=seconds)

    @precondition(lambda self: self.world.observed().gang.probes)
    @happens()
    def probe_is_evicted(self):
        self.world.pod(self.world.observed().gang.probes[-1].metadata.name, phase="Failed")

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
        self.asked_by_users += nodes != self.world.job.spec.num_nodes
        self.world.spec(num_nodes=nodes)


Capacities.TestCase.settings = examples(20, stateful_step_count=40, report_multiple_bugs=False)
TestCapacities = Capacities.TestCase
Histories.TestCase.settings = examples(60, stateful_step_count=50, report_multiple_bugs=False)
TestHistories = Histories.TestCase
