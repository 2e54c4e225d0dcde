"""Cohorts across namespaces: a cohort name gives no access to the quota of another tenant."""

import pytest
from msgspec.structs import replace

from queueing import NOW, admitted, admitted_workload, decide, nodes, queue, request
from torchrun_api.kinds.admission import Admission
from torchrun_controller.reconcile.admission.cohorts import Cohorts
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.model import ClusterState, Decisions, Workload
from world import make_job

PROD = (
    replace(queue("a", quota={"gpus": 32}, cohort="lab"), namespace="prod"),
    replace(queue("b", quota={"gpus": 32}, cohort="lab"), namespace="prod"),
)
OTHER = replace(queue("a", quota={"gpus": 1_000_000}, cohort="lab"), namespace="other")
# Eight nodes: queue a uses its own four, and borrows four from b.
RUNNING = tuple(
    replace(
        admitted_workload(f"prod-{i}", "a", admitted_for=i, pods_by_node={f"n{i:03}": 1}),
        namespace="prod",
    )
    for i in range(8)
)


def decided(*requests: Workload, shared: tuple[str, ...] = ()) -> Decisions:
    state = ClusterState(
        nodes=nodes(8),
        queues=(*PROD, OTHER),
        workloads=(*RUNNING, *requests),
        cohort_namespaces=shared,
    )
    return admit(state, NOW)


@pytest.mark.parametrize("shared", [(), ("prod",), ("other",), ("prod", "third")])
def test_a_queue_of_another_namespace_takes_nothing_back(shared):
    grab = replace(request("grab", "a", 4), namespace="other")
    decisions = decided(grab, shared=shared)
    assert decisions.preemptions == ()
    assert decisions.pending["grab"].reason == "WaitingForNodes"


@pytest.mark.parametrize("shared", [(), ("prod",)])
def test_a_queue_of_another_namespace_lends_nothing(shared):
    more = replace(request("more", "b", 1), namespace="prod")
    decisions = decided(more, shared=shared)
    assert decisions.pending["more"].reason == "Preempting", "it reclaims its own quota"
    wide = replace(request("wide", "b", 9), namespace="prod")
    assert decided(wide, shared=shared).pending["wide"].reason == "ExceedsQuota"


def test_a_queue_that_borrows_has_nothing_free():
    summaries = [one for one in decided().queues if one.namespace == "prod"]
    assert [(one.name, one.free.gpus, one.borrowed.gpus) for one in summaries] == [
        ("a", 0, 32),
        ("b", 32, 0),
    ]


def test_an_administrator_may_let_namespaces_share_their_cohorts():
    grab = replace(request("grab", "a", 4), namespace="other")
    decisions = decided(grab, shared=("other", "prod"))
    assert {one.reason for one in decisions.preemptions} == {"Reclaimed"}


def test_within_a_namespace_queues_lend_as_ever():
    asked = [request("j", "a", 2)]
    queues = [queue(name, quota={"gpus": 8}, cohort="lab") for name in ("a", "b")]
    assert admitted(decide(nodes(2), queues, *asked)) == ["j"]


def test_a_queue_that_would_borrow_itself_keeps_nothing_from_another():
    asked = [request("a-job", "a", 3), request("b-job", "b", 3)]
    quotas = {"a": 8, "b": 8, "c": 32}
    queues = [queue(name, quota={"gpus": gpus}, cohort="lab") for name, gpus in quotas.items()]
    assert admitted(decide(nodes(6), queues, *asked)) == ["a-job", "b-job"]


def test_priorities_of_different_queues_are_not_compared():
    """A priority in one queue must not decide about jobs of another queue."""
    queues = [
        queue("a", quota={"gpus": 8}, cohort="lab"),
        queue("b", quota={"gpus": 8}, cohort="lab"),
        queue("c", quota={"gpus": 16}, cohort="lab"),
    ]
    running = [
        admitted_workload("a-old", "a", admitted_for=9, priority=1_000_000),
        admitted_workload("a-young", "a", admitted_for=1, priority=1_000_000),
        admitted_workload("b-old", "b", admitted_for=8),
        admitted_workload("b-young", "b", admitted_for=2),
    ]
    decisions = decide(nodes(4), queues, *running, request("mine", "c"))
    assert [one.uid for one in decisions.preemptions] == ["a-young"]
    decisions = decide(nodes(4), queues, *running, request("mine", "c", 2))
    assert sorted(one.uid for one in decisions.preemptions) == ["a-young", "b-young"]


@pytest.mark.parametrize(
    ("named", "charged", "expected"),
    [
        ("a", None, {("prod", "lab", "")}),
        ("a", "b", {("prod", "lab", "")}),
        ("a", "gone", {("prod", "lab", ""), ("prod", "", "gone")}),
        ("gone", "", {("prod", "", "gone")}),
    ],
)
def test_a_job_belongs_to_the_cohorts_of_its_queue_and_of_its_charge(named, charged, expected):
    job = make_job(jobQueue=named)
    admission = None if charged is None else Admission(nodes=1, queue=charged)
    job = replace(
        job,
        metadata=replace(job.metadata, namespace="prod"),
        status=replace(job.status, admission=admission),
    )
    assert Cohorts(ClusterState(queues=(*PROD, OTHER))).of_job(job) == expected


def test_queues_of_namespaces_that_share_cohorts_are_in_one():
    cohorts = Cohorts(ClusterState(cohort_namespaces=("prod", "other")))
    assert {cohorts.key(queue) for queue in (*PROD, OTHER)} == {("", "lab", "")}
