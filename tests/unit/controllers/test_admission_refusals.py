"""A refused status of one job: which admissions wait for it, and which go on."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.admission import Admission
from torchrun_controller.client import ApiError
from torchrun_controller.client.write_errors import UnavailableError
from torchrun_controller.controllers.admission import BEHIND_RETRY, SETTLE_SECONDS
from torchrun_controller.controllers.controller import Behind, Done, RequeueAfter
from torchrun_controller.reconcile.admission.model import (
    ClusterState,
    Decisions,
    Grant,
    PendingStatus,
    Preemption,
    Queue,
    QueueSummary,
    RoundRobinState,
)
from unit.controllers.admitting_world import KEY, World, admit

REFUSAL = ApiError(422, "Invalid", "no")


@pytest.fixture
def world() -> World:
    return World()


async def test_a_refused_write_is_not_expected_in_the_cache(world: World) -> None:
    world.job("a")
    world.decisions = admit("a")
    world.failures["a"] = [(ApiError(403, "Forbidden", "no"), False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log == []
    world.time += 1
    assert await world.reconciler.attempt(KEY) == Done()
    assert world.log == ["a"]


@pytest.mark.parametrize("refused", ["a", "q"])
async def test_a_refused_write_does_not_silence_other_jobs(world: World, refused: str) -> None:
    for name in ("a", "b"):
        world.job(name)
    turns = RoundRobinState(weight=1, current=0)
    summary = QueueSummary(namespace="t", name="lab", round_robin=turns, admitted=1)
    waits = {"b": PendingStatus("BehindInQueue", "wait", 1)}
    world.decisions = Decisions(queues=(summary,), grants=admit("a").grants, pending=waits)
    world.failures[refused] = [(ApiError(403, "Forbidden", "no"), False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log[-1] == "b"
    assert refused not in world.log


def cohorts(cohort_of_other: str) -> ClusterState:
    """Return queues: `lab` and `annex` share a cohort, `other` is in `cohort_of_other`."""
    return ClusterState(
        queues=(
            Queue(namespace="t", name="lab", cohort="ours"),
            Queue(namespace="t", name="annex", cohort="ours"),
            Queue(namespace="t", name="other", cohort=cohort_of_other),
        )
    )


@pytest.mark.parametrize("cohort", ["", "theirs"])
async def test_a_refused_release_delays_its_cohort_only(world: World, cohort: str) -> None:
    world.state = cohorts(cohort)
    world.job("smaller", held=4, queue="lab")
    for queue in ("lab", "annex", "other"):
        world.job(f"of-{queue}", queue=queue)
    grants = admit("of-lab", "of-annex", "of-other").grants
    world.decisions = Decisions(grants=(Grant(uid="smaller", nodes=1), *grants))
    world.failures["smaller"] = [(REFUSAL, False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log == ["of-other"], "the quota of the others is not free yet"
    world.catch_up()
    world.time += 0.5
    assert isinstance(await world.reconciler.attempt(KEY), RequeueAfter)
    assert world.log == ["of-other"], "the release is not due again yet"
    world.time += 0.5
    assert await world.reconciler.attempt(KEY) == Done()
    assert sorted(world.log[1:]) == ["of-annex", "of-lab", "smaller"]


async def test_a_refused_nomination_preempts_nothing_in_its_cohort(world: World) -> None:
    world.state = cohorts("theirs")
    for queue in ("lab", "other"):
        world.job(f"head-{queue}", queue=queue)
        world.job(f"victim-{queue}", held=4, queue=queue)
    world.decisions = Decisions(
        preemptions=tuple(
            Preemption(
                uid=f"victim-{queue}", for_uid=f"head-{queue}", reason="Reclaimed", message="for it"
            )
            for queue in ("lab", "other")
        ),
        pending={
            f"head-{queue}": PendingStatus("Preempting", "room is made", 1, True)
            for queue in ("lab", "other")
        },
    )
    world.failures["head-lab"] = [(REFUSAL, False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log == ["head-other", "victim-other"]


async def test_a_refused_release_delays_the_queue_that_is_charged(world: World) -> None:
    """The job was moved to another queue after its admission."""
    world.state = cohorts("theirs")
    world.job("moved", held=4, queue="other")
    moved = world.server["moved"]
    charge = Admission(nodes=4, queue="lab")
    world.server["moved"] = replace(moved, status=replace(moved.status, admission=charge))
    world.catch_up()
    world.job("of-lab", queue="lab")
    world.job("of-other", queue="other")
    grants = admit("of-lab", "of-other").grants
    world.decisions = Decisions(grants=(Grant(uid="moved", nodes=1), *grants))
    world.failures["moved"] = [(REFUSAL, False)]
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    assert world.log == []


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_release_without_a_response_delays_every_admission(
    world: World, carried_out: bool
) -> None:
    world.state = cohorts("theirs")
    world.job("smaller", held=4, queue="lab")
    world.job("refused", held=4, queue="lab")
    world.job("of-other", queue="other")
    releases = (Grant(uid="smaller", nodes=1), Grant(uid="refused", nodes=1))
    world.decisions = Decisions(grants=(*releases, *admit("of-other").grants))
    world.failures["smaller"] = [(UnavailableError("no answer"), carried_out)]
    world.failures["refused"] = [(REFUSAL, False)]
    with pytest.raises(UnavailableError):
        await world.reconciler.attempt(KEY)
    assert "of-other" not in world.log


async def test_a_refused_repetition_does_not_show_what_the_first_write_did(world: World) -> None:
    """An API server that starts again may forbid requests for a moment."""
    world.job("a")
    world.decisions = admit("a")
    forbidden = ApiError(403, "Forbidden", "no")
    world.failures["a"] = [(UnavailableError("no answer"), False), (forbidden, False)]
    with pytest.raises(UnavailableError):
        await world.reconciler.attempt(KEY)
    with pytest.raises(ApiError):
        await world.reconciler.attempt(KEY)
    world.late_write("a")
    world.time += SETTLE_SECONDS - 1
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    world.time += 1
    assert await world.reconciler.attempt(KEY) == Behind(BEHIND_RETRY)
    assert world.decided == 1
    world.catch_up()
    await world.reconciler.attempt(KEY)
    assert world.decided == 2
