"""The audit log has one line for each decision, and no others."""

from typing import Any

import pytest
import structlog

from torchrun_api.kinds.resources import JOBS, SERVICES
from torchrun_api.kinds.status import Attempt, Progress, TorchrunJobStatus, WorkersStatus
from torchrun_api.names import ATTEMPT_LABEL
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.controllers import decision_log
from torchrun_controller.reconcile.model.plan import Apply, Delete, Plan, StatusWrite
from unit.controllers.neighbours import KEY, World, observed

SERVICE = Apply(SERVICES, {"metadata": {"name": "run", "namespace": "team"}})
GANG = Apply(
    JOBS,
    {"metadata": {"name": "run-r2", "namespace": "team", "labels": {ATTEMPT_LABEL: "2"}}},
)
GONE = Delete(kind=JOBS, namespace="team", name="run", uid="u")
RUNNING = TorchrunJobStatus(phase="Running", reason="AllRun", message="2 of 2 workers run")
FIRST = Attempt(number=0, counted=True, reason="Crashed", message="rank 1 exited with 1")
ABOUT = {"job": "team/run", "uid": "job", "log_level": "info"}


def logged(before: TorchrunJobStatus, after: TorchrunJobStatus) -> list[tuple[str, dict[str, Any]]]:
    return [(line.event, dict(line.fields)) for line in decision_log.status_lines(before, after)]


def test_an_unchanged_status_is_not_logged() -> None:
    assert logged(RUNNING, RUNNING) == []


def test_changed_counts_and_progress_are_not_logged() -> None:
    counts = {"workers": WorkersStatus(running=2), "workers_status": "2/2 ready"}
    after = TorchrunJobStatus(
        phase="Running", reason="AllRun", message="2 run", progress=Progress(step=4), **counts
    )
    assert logged(RUNNING, after) == []


def test_a_phase_with_its_reason() -> None:
    assert logged(TorchrunJobStatus(), RUNNING) == [
        (
            "phase changed",
            {
                "attempt": 0,
                "was": None,
                "phase": "Running",
                "reason": "AllRun",
                "why": "2 of 2 workers run",
            },
        )
    ]


def test_another_reason_in_the_same_phase() -> None:
    waits = TorchrunJobStatus(phase="Queued", reason="NoRoom", message="3 nodes are missing")
    fields = {"attempt": 0, "phase": "Queued", "reason": "NoRoom", "why": "3 nodes are missing"}
    assert logged(TorchrunJobStatus(phase="Queued"), waits) == [("reason changed", fields)]


def test_a_restart_and_a_phase_are_separate_lines() -> None:
    after = TorchrunJobStatus(
        phase="Queued", reason="BackingOff", attempt=1, restarts=1, attempts=(FIRST,)
    )
    ended, phase = logged(RUNNING, after)
    assert ended == (
        "attempt ended",
        {
            "attempt": 0,
            "phase": "Queued",
            "reason": "Crashed",
            "why": "rank 1 exited with 1",
            "counted": True,
            "restarts": 1,
            "disruptions": 0,
        },
    )
    assert (phase[0], phase[1]["attempt"], phase[1]["was"]) == ("phase changed", 1, "Running")


def test_recorded_attempts_are_not_logged_again() -> None:
    second = Attempt(number=1, reason="NodeLost")
    before = TorchrunJobStatus(attempts=(FIRST,))
    after = TorchrunJobStatus(attempts=(FIRST, second))
    assert [fields["attempt"] for _, fields in logged(before, after)] == [1]


class TestInTheReconciler:
    """Only successful writes are logged."""

    async def test_an_empty_plan_logs_nothing(self, world: World) -> None:
        with structlog.testing.capture_logs() as lines:
            await world.reconciler.attempt(KEY)
        assert lines == []

    async def test_objects_are_logged_by_outcome(self, world: World) -> None:
        last_number = Apply(SERVICES, SERVICE.body, "uid")
        world.plan = lambda _: Plan(writes=(SERVICE, GANG, last_number, GONE))
        with structlog.testing.capture_logs() as lines:
            await world.reconciler.attempt(KEY)
        assert [line for line in lines if line["log_level"] == "info"] == [
            {"event": "object created", **ABOUT, "object": "Service/run"},
            {"event": "attempt created", **ABOUT, "attempt": 2, "object": "Job/run-r2"},
            {"event": "object deleted", **ABOUT, "object": "Job/run"},
        ]

    async def test_a_status_without_a_decision_is_logged_at_debug(self, world: World) -> None:
        world.present[KEY] = observed("Running")
        after = TorchrunJobStatus(phase="Running", workers_status="2/2 ready")
        world.plan = lambda _: Plan(writes=(StatusWrite(status=after),))
        with structlog.testing.capture_logs() as lines:
            await world.reconciler.attempt(KEY)
        assert [line["log_level"] for line in lines] == ["debug"]

    async def test_a_failed_write_logs_no_decision(self, world: World) -> None:
        world.failures = [SupersededError("changed meanwhile")]
        world.plan = lambda _: Plan(writes=(StatusWrite(status=RUNNING),))
        with structlog.testing.capture_logs() as lines:
            with pytest.raises(SupersededError):
                await world.reconciler.attempt(KEY)
            assert lines == []
            await world.reconciler.attempt(KEY)
        assert [line["event"] for line in lines] == ["phase changed"]


@pytest.fixture
def world() -> World:
    return World()
