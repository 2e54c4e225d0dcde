"""spec.dependsOn: which jobs wait, their messages, and jobs that can never start."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from torchrun_api.kinds.admission import Dependency
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS
from torchrun_controller.reconcile.job.dependencies import follow
from torchrun_controller.reconcile.model.observed import Conflict, Observed
from world import START, ZIP, World, make_job, make_queue


def job(name: str, *parents: str, phase: str = "", **status: Any) -> TorchrunJob:
    """Another job of the namespace, with this status."""
    body = make_job(numNodes=1, dependsOn=[{"name": parent} for parent in parents])
    reported = {"phase": phase, **status} if phase else status
    return msgspec.convert(
        {
            "metadata": {"name": name, "namespace": "ml"},
            "spec": msgspec.to_builtins(body.spec),
            "status": reported,
        },
        TorchrunJob,
    )


class Family(World):
    """A job and its dependencies."""

    parents: dict[str, TorchrunJob]

    def __init__(self, *dependencies: Any, **spec: Any) -> None:
        named = [d if isinstance(d, dict) else {"name": d} for d in dependencies]
        super().__init__(make_job(numNodes=1, dependsOn=named, **spec), make_queue())
        self.parents = {}

    def observed(self) -> Observed:
        names = {dependency.name for dependency in self.job.spec.depends_on}
        return replace(
            super().observed(),
            parents={name: job for name, job in self.parents.items() if name in names},
            waits_for=follow(self.job, self.parents.get),
        )

    def know(self, *jobs: TorchrunJob) -> None:
        self.parents |= {j.metadata.name: j for j in jobs}
        self.settle()

    @property
    def starts(self) -> bool:
        return (JOBS.plural, "train") in self.created


def test_a_job_starts_when_its_dependency_has_succeeded():
    world = Family("prep")
    world.know(job("prep", phase="Running", reason="WorkersRunning"))
    assert (world.phase, world.job.status.reason) == ("Queued", "WaitingForDependencies")
    condition = world.condition("DependenciesMet")
    assert condition.status == "False"
    assert (
        condition.message == "Waiting for prep to be Succeeded (currently Running, WorkersRunning)."
    )
    assert not world.starts
    world.know(job("prep", phase="Succeeded"))
    assert world.starts
    assert world.condition("DependenciesMet").status == "True"


def test_a_missing_dependency_is_named_and_may_be_created_later():
    world = Family("prep", "other")
    world.know(job("other", phase="Succeeded"))
    assert world.job.status.reason == "DependencyNotFound"
    assert world.job.status.message == (
        "TorchrunJob prep does not exist. Submit it or remove it from spec.dependsOn."
    )
    world.know(job("prep"))
    assert world.job.status.message == "Waiting for prep to be Succeeded (currently Pending)."
    world.know(job("prep", phase="Succeeded"))
    assert world.starts


def test_a_job_whose_last_dependency_is_removed_has_no_condition_on_it():
    world = Family("prep")
    world.settle()
    assert world.condition("DependenciesMet").reason == "DependencyNotFound"
    world.spec(depends_on=())
    world.settle()
    assert world.starts
    assert "DependenciesMet" not in {c.type for c in world.job.status.conditions}


@pytest.mark.parametrize(
    ("condition", "parent", "starts"),
    [
        ("Running", job("p", phase="Queued"), False),
        ("Running", job("p", phase="Running", startTime=START.isoformat()), True),
        ("Running", job("p", phase="Queued", startTime=START.isoformat()), True),
        ("Running", job("p", phase="Failed", startTime=START.isoformat()), True),
        ("Running", job("p", phase="Succeeded"), True),
        ("Finished", job("p", phase="Running"), False),
        ("Finished", job("p", phase="Failed"), True),
        ("Finished", job("p", phase="TimedOut"), True),
        ("Succeeded", job("p", phase="Suspended"), False),
        ("Succeeded", job("p", phase="Preempted"), False),
    ],
)
def test_phases_that_meet_each_condition(condition: str, parent: TorchrunJob, starts: bool):
    world = Family({"name": "p", "condition": condition})
    world.know(parent)
    assert world.starts is starts
    assert world.phase == "Queued"


@pytest.mark.parametrize(
    ("condition", "phase"),
    [("Succeeded", "Failed"), ("Succeeded", "TimedOut"), ("Running", "Failed")],
)
def test_a_failed_dependency_fails_the_job(condition: str, phase: str):
    world = Family({"name": "p", "condition": condition}, "missing")
    world.know(job("p", phase=phase, reason="WorkerFailed", message="rank 1 exited with 9"))
    assert (world.phase, world.job.status.reason) == ("Failed", "DependencyFailed")
    assert world.job.status.message == (
        f"TorchrunJob p is {phase} and cannot become {condition} (WorkerFailed)."
        " rank 1 exited with 9."
    )
    assert world.job.status.completion_time == START


def test_a_failed_dependency_without_a_message():
    world = Family("p")
    world.know(job("p", phase="Failed", reason="InvalidSpec"))
    assert (
        world.job.status.message
        == "TorchrunJob p is Failed and cannot become Succeeded (InvalidSpec)."
    )


@pytest.mark.parametrize(
    ("own", "others", "printed"),
    [
        ("train", [], "train -> train"),
        ("a", [job("a", "train")], "train -> a -> train"),
        ("a", [job("a", "b", "gone"), job("b", "c", "b"), job("c", "train")], "a -> b -> c -> tr"),
    ],
)
def test_a_cycle_is_named_and_can_be_removed(own: str, others: list[TorchrunJob], printed: str):
    world = Family(own)
    world.know(*others)
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")
    assert printed in world.job.status.message
    assert not world.created
    world.spec(depends_on=())
    world.settle()
    assert world.starts


def test_a_cycle_behind_another_dependency_is_named_once_that_is_met():
    world = Family("a", "b")
    world.know(job("a", phase="Running"), job("b", "train"))
    assert world.job.status.reason == "WaitingForDependencies"
    world.know(job("a", phase="Succeeded"))
    assert "train -> b -> train" in world.job.status.message


def test_the_search_for_a_cycle_follows_one_path():
    jobs = {f"j{n}": job(f"j{n}", *(f"j{k}" for k in range(n - 8, n))) for n in range(2000)}
    looked_up: list[str] = []

    def find(name: str) -> TorchrunJob | None:
        looked_up.append(name)
        return jobs.get(name)

    chain = follow(jobs["j1999"], find)
    assert len(chain) == 250
    assert len(looked_up) <= 2 * len(chain)
    assert len(follow(jobs["j1999"], find, most=10)) == 10


def test_a_dependency_in_a_cycle_of_others_is_waited_for():
    world = Family("a")
    world.know(job("a", "b"), job("b", "a"))
    assert world.job.status.reason == "WaitingForDependencies"


def test_the_workspace_is_prepared_meanwhile():
    world = Family("prep", volumes=ZIP)
    world.know(job("prep", phase="Running"))
    assert world.phase == "Syncing"
    world.sync_done()
    world.settle()
    assert world.job.status.reason == "WaitingForDependencies"
    assert world.condition("WorkspaceReady").status == "True"
    world.know(job("prep", phase="Succeeded"))
    assert world.starts


def test_a_met_dependency_may_be_deleted():
    world = Family("prep")
    world.conflicts = (Conflict(JOBS.resource, "train", "somebody else's"),)
    world.know(job("prep", phase="Succeeded"))
    assert world.job.status.reason == "NameConflict"
    del world.parents["prep"]
    world.settle()
    assert world.job.status.reason == "NameConflict"
    world.conflicts = ()
    world.settle()
    assert world.starts


def test_a_lost_first_status_still_shows_met_dependencies():
    world = Family("prep")
    world.know(job("prep", phase="Running"))
    world.parents["prep"] = job("prep", phase="Succeeded")
    world.step(writes=2)  # writes the Service and the Job, but no status
    assert world.starts
    assert world.condition("DependenciesMet").status == "False"
    world.settle()
    assert world.condition("DependenciesMet").status == "True"


def test_a_met_dependency_stays_met_during_the_wait_for_another():
    world = Family("first", "second")
    world.know(job("first", phase="Succeeded"), job("second", phase="Running"))
    del world.parents["first"]  # deleted by its TTL
    world.settle()
    assert world.job.status.reason == "WaitingForDependencies"
    assert world.job.status.message == "Waiting for second to be Succeeded (currently Running)."
    world.know(job("second", phase="Succeeded"))
    assert world.starts


def test_a_met_dependency_survives_a_failed_job_of_its_name():
    world = Family("first", "second")
    world.know(job("first", phase="Succeeded"), job("second", phase="Running"))
    world.know(job("first", phase="Failed"))
    assert world.job.status.reason == "WaitingForDependencies"
    assert [one.name for one in world.job.status.dependencies_met] == ["first"]


def test_a_met_dependency_stays_met_during_a_suspension():
    world = Family("first", "second", suspend=True)
    world.know(job("first", phase="Succeeded"), job("second", phase="Running"))
    assert world.phase == "Suspended"
    del world.parents["first"]
    world.spec(suspend=False)
    world.know(job("second", phase="Succeeded"))
    assert world.starts


def test_a_changed_condition_is_checked_again():
    world = Family({"name": "first", "condition": "Running"}, "second")
    world.know(job("first", phase="Running", startTime=START.isoformat()), job("second"))
    world.spec(depends_on=(Dependency(name="first"), Dependency(name="second")))
    world.settle()
    assert world.job.status.dependencies_met == ()
    assert world.job.status.message.startswith(
        "Waiting for first to be Succeeded (currently Running)"
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from(["Running", "Succeeded", "gone", "Failed", ""])
        ),
        max_size=20,
    )
)
def test_any_order_of_successes_and_deletions_starts_the_job(
    steps: list[tuple[int, str]],
):
    world = Family("p0", "p1")
    succeeded: set[int] = set()
    for number, phase in steps:
        name = f"p{number}"
        if phase == "gone":
            world.parents.pop(name, None)
        elif phase != "Failed" or number in succeeded:
            world.parents[name] = job(name, phase=phase)
        world.settle()
        if phase == "Succeeded":
            succeeded.add(number)
        assert world.starts is (len(succeeded) == 2)


def test_an_edit_checks_the_dependencies_again():
    world = Family("prep")
    world.conflicts = (Conflict(JOBS.resource, "train", "somebody else's"),)
    world.know(job("prep", phase="Succeeded"))
    world.spec(depends_on=(Dependency(name="prep"), Dependency(name="more")))
    world.conflicts = ()
    world.settle()
    assert world.job.status.reason == "DependencyNotFound"
    assert not world.starts


def test_a_started_job_ignores_its_dependencies():
    world = Family("prep")
    world.know(job("prep", phase="Succeeded"))
    world.pod(world.workers()[0].metadata.name, phase="Running")
    world.know(job("prep", "train", phase="Failed"))
    assert world.phase == "Running"
    assert not [key for key in world.created if key[0] == PODS.plural]


def _expired(phase: str) -> World:
    """A finished job whose TTL has passed."""
    world = World(make_job(numNodes=1, reliability={"ttlSecondsAfterFinished": 20}), make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.job_condition("Complete")
    world.settle()
    world.job = replace(world.job, status=replace(world.job.status, phase=phase))
    world.pass_time(seconds=21)
    return world


def _deletes_itself(world: World) -> bool:
    return TORCHRUN_JOBS in [delete.kind for delete in world.plan().deletes]


_RECORD = {"name": "train", "condition": "Succeeded", "uid": "uid-train"}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize(
    ("dependent", "deleted"),
    [
        (job("next", "train"), False),
        (job("next", "train", phase="Queued"), False),
        (job("next", "train", dependenciesMet=[{**_RECORD, "condition": "Finished"}]), False),
        (job("next", "train", dependenciesMet=[_RECORD]), True),
        (job("next", "train", phase="Failed"), True),
        (job("next", "train", phase="Running", workers={}), True),
        (job("next", "other"), True),
    ],
)
def test_a_finished_job_outlives_its_ttl_until_its_dependents_record_it(
    phase: str, dependent: TorchrunJob, deleted: bool
):
    world = _expired(phase)
    world.neighbours = (dependent,)
    assert _deletes_itself(world) is deleted
    world.neighbours = ()
    assert _deletes_itself(world)


def test_a_terminating_dependent_delays_no_ttl():
    world = _expired("Succeeded")
    dependent = job("next", "train")
    ending = replace(dependent.metadata, deletion_timestamp=START)
    world.neighbours = (replace(dependent, metadata=ending),)
    assert _deletes_itself(world)
