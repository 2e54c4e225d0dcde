"""What a Plan has the API server confirm before its writes, and their order."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import Job, Pod
from torchrun_api.kinds.resources import CLAIMS, JOBS, SERVICES, Kind
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.reconcile import Observed
from torchrun_controller.reconcile.job.writes import find_checks
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.plan import (
    Apply,
    Check,
    GangIsGone,
    JobIsThere,
    NoPodIsUnseen,
    PodIsUnchanged,
)
from world import make_job

JOB_IS_THERE = JobIsThere(namespace="ml", name="train", uid="uid-train")
GANG_IS_GONE = GangIsGone(namespace="ml", name="train-r1", owner="uid-train")
HAD_A_GANG = {"phase": "Running", "attempt": 1, "workers": {}}


def checks(
    observed: Observed, *created: Kind[Any], status: dict[str, Any] | None = None
) -> tuple[Check, ...]:
    """The checks before objects of these kinds are created, and this status is written."""
    applies = tuple(Apply(kind, {"metadata": {"name": "train-r2"}}) for kind in created)
    return find_checks(
        observed, applies, None if status is None else msgspec.convert(status, TorchrunJobStatus)
    )


def seen(status: dict[str, Any], *attempts: int, pods: tuple[int, ...] = ()) -> Observed:
    """Job, status, the Jobs of these attempts, and pods of others."""
    job = make_job(numNodes=2)
    children = tuple(
        msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": str(each)}}}, Job)
        for each in attempts
    )
    stale_pods = tuple(
        msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": str(each)}}}, Pod)
        for each in pods
    )
    return Observed(
        job=replace(job, status=msgspec.convert(status, TorchrunJobStatus)),
        gang=ObservedGang(child_jobs=children, stale_pods=stale_pods),
    )


@pytest.mark.parametrize(
    ("observed", "created"),
    [
        (seen({}), (SERVICES, JOBS)),
        (seen({"phase": "Syncing"}), (SERVICES, JOBS)),
        (seen(HAD_A_GANG, 0, 1), (JOBS,)),
        (seen(HAD_A_GANG), ()),
    ],
    ids=["first", "workspace is ready", "restart", "nothing is created"],
)
def test_nothing_is_read_if_the_cache_suffices(observed, created):
    assert checks(observed, *created) == ()


def test_an_update_needs_no_read():
    service = Apply(SERVICES, {"metadata": {"name": "train"}}, uid="uid-service")
    assert find_checks(seen(HAD_A_GANG), (service,), None) == ()


@pytest.mark.parametrize(
    ("observed", "created"),
    [
        (seen(HAD_A_GANG), (JOBS,)),
        (seen(HAD_A_GANG, 0), (JOBS,)),
        (seen({}, pods=(1,)), (SERVICES, JOBS)),
        (seen({**HAD_A_GANG, "attempt": 0}, 0, pods=(1,)), (JOBS,)),
    ],
    ids=["no gang", "no new gang", "only pods", "only pods of the newest gang"],
)
def test_a_gang_that_the_cache_may_not_show_is_read_before_another(observed, created):
    assert checks(observed, *created) == (JOB_IS_THERE, GANG_IS_GONE)


def test_a_job_is_read_before_its_workspace_is_created_again():
    assert checks(seen({"phase": "Syncing"}), CLAIMS) == (JOB_IS_THERE,)
    assert checks(seen(HAD_A_GANG), SERVICES) == (JOB_IS_THERE,)


@pytest.mark.parametrize("end", [{"phase": "Failed"}, {"attempts": [{"number": 1}]}])
def test_a_gang_is_read_before_its_end_is_recorded(end):
    """The Job seems to be deleted. With restartPolicy Never, the TorchrunJob would fail."""
    assert checks(seen(HAD_A_GANG, 0), status=end) == (JOB_IS_THERE, GANG_IS_GONE)
    assert checks(seen(HAD_A_GANG, 1), status=end) == ()


def test_a_recorded_end_needs_no_read():
    recorded = {**HAD_A_GANG, "attempts": [{"number": 1}]}
    assert checks(seen(recorded), status=recorded) == ()


@pytest.mark.parametrize("phase", ["Suspended", "Preempted"])
def test_pods_are_read_before_the_first_report_that_none_runs(phase):
    """The Job was deleted before the watch of pods, which is dead, showed its pods."""
    lost = msgspec.convert({"metadata": {"uid": "uid-lost"}}, Pod)
    observed = seen(HAD_A_GANG, 1)
    observed = replace(observed, gang=replace(observed.gang, workers=(lost,)))
    no_others = NoPodIsUnseen(namespace="ml", job="train", uids=frozenset({"uid-lost"}))
    assert checks(observed, status={"phase": phase}) == (no_others,)
    for earlier in (seen({"phase": phase, "workers": {}}, 1), seen({"phase": "Pending"})):
        assert checks(earlier, status={"phase": phase}) == (), "repeated, or never had a gang"


def test_pods_without_a_node_are_read_before_a_gang_shrinks():
    job = make_job(numNodes=2, elastic={"minNodes": 1, "maxNodes": 2})
    status = msgspec.convert({**HAD_A_GANG, "phase": "Queued"}, TorchrunJobStatus)
    child = msgspec.convert({"metadata": {"labels": {"torchrun.ai/attempt": "1"}}}, Job)
    pods = tuple(
        msgspec.convert(
            {
                "metadata": {
                    "namespace": "ml",
                    "name": f"train-r1-{index}",
                    "resourceVersion": "7",
                },
                "spec": {"nodeName": node},
                "status": {"phase": "Pending"},
            },
            Pod,
        )
        for index, node in enumerate(("node-0", ""))
    )
    observed = Observed(
        job=replace(job, status=status), gang=ObservedGang(child_jobs=(child,), workers=pods)
    )
    unscheduled = PodIsUnchanged(namespace="ml", name="train-r1-1", resource_version="7")
    assert checks(observed, JOBS) == (unscheduled,)
    assert checks(observed) == ()
