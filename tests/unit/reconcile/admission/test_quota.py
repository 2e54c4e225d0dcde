"""Quotas, and borrowing within a cohort."""

import pytest
from msgspec.structs import replace

from queueing import admitted, admitted_workload, decide, nodes, queue, request
from torchrun_controller.reconcile.admission.model import Amounts, QuotaLimits


def test_a_queue_gets_its_quota_and_no_more():
    asked = [request(f"j{i}", "a", age=9 - i) for i in range(4)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 20})], *asked)
    assert admitted(decisions) == ["j0", "j1"]
    wait = decisions.pending["j2"]
    assert wait.reason == "InsufficientQuota"
    assert wait.message.startswith(
        "The job needs 8 GPUs on 1 node. The quota of queue a has 4 GPUs of 20 GPUs left."
    )
    (summary,) = decisions.queues
    assert (summary.used.gpus, summary.used.nodes, summary.used.jobs) == (16, 2, 2)
    assert summary.free == QuotaLimits(gpus=4)
    assert (summary.pending, summary.admitted, summary.running) == (2, 2, 0)


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("nodes", 3, "The quota of queue a has 1 node of 3 nodes left."),
        ("jobs", 1, "The quota of queue a has 0 jobs of 1 job left."),
        ("cpu", 3000, "The quota of queue a has 1 CPU of 3 CPUs left."),
        ("memory", 3 << 30, "The quota of queue a has 1Gi of memory of 3Gi of memory left."),
    ],
)
def test_every_kind_of_quota_counts(kind, limit, message):
    machine = replace(nodes(1)[0], allocatable={"cpu": 96_000, "memory": 1 << 40})
    pods = {"cpu": 1000, "memory": 1 << 30}
    asked = [replace(request(f"j{i}", "a", 2, 0, age=9 - i), pod=pods) for i in range(2)]
    decisions = decide((machine,), [queue("a", quota={kind: limit})], *asked)
    assert admitted(decisions) == ["j0"]
    assert message in decisions.pending["j1"].message


def test_a_job_beyond_the_quota_is_reported_and_delays_no_other():
    asked = [request("big", "a", 4, age=9), request("small", "a", age=1)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 16})], *asked)
    assert admitted(decisions) == ["small"]
    wait = decisions.pending["big"]
    assert (wait.reason, wait.position) == ("ExceedsQuota", 0)
    assert "The quota of queue a is 16 GPUs in total." in wait.message


def test_jobs_without_gpus_are_admitted_despite_exceeded_gpus():
    asked = [admitted_workload("h", "a", 2), request("cpu", "a", 1, 0)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 8})], *asked)
    assert admitted(decisions) == ["cpu"]


RAY = {"head": {"cpu": 1000}}  # a head without GPUs, and workers with 8


def test_a_head_is_charged_with_its_own_requests():
    state = nodes(4), [queue("a", quota={"gpus": 32})]
    decisions = decide(*state, request("ray", "a", 5, **RAY))
    assert admitted(decisions) == ["ray"]
    assert decisions.grants[0].nodes == 5
    assert sorted(decisions.grants[0].placement.values()) == [1, 1, 1, 1]
    (summary,) = decisions.queues
    assert (summary.used.gpus, summary.used.nodes, summary.used.cpu) == (32, 5, 1000)
    running = admitted_workload(
        "ray", "a", 5, pods_by_node={"n000": 1, "n001": 1, "n002": 1}, **RAY
    )
    decisions = decide(nodes(5), state[1], running, request("next", "a"))
    assert decisions.pending["next"].reason == "InsufficientQuota"
    more = [queue("a", quota={"gpus": 64})]
    assert admitted(decide(nodes(5), more, running, request("next", "a"))) == ["next"]
    assert not admitted(decide(nodes(4), more, running, request("next", "a")))


def test_only_what_pods_request_is_charged():
    asked = [request("a-1", "a", 2), request("a-2", "a", 2, head={}, head_gpus=0)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 99})], *asked)
    assert decisions.queues[0].used == Amounts(nodes=4, gpus=24, jobs=2)


def test_a_head_counts_separately_with_too_few_nodes():
    decisions = decide(nodes(3), [queue("a")], request("ray", "a", 5, **RAY))
    wait = decisions.pending["ray"]
    assert wait.reason == "ExceedsNodes"
    assert wait.message.startswith(
        "The job needs 32 GPUs on 5 nodes. Machines that are ready have room for 3 of 4 pods in"
        " addition to the head."
    )


def cohort(**quotas):
    return [queue(name, quota={"gpus": gpus}, cohort="c") for name, gpus in quotas.items()]


def test_idle_quota_can_be_borrowed():
    asked = [request(f"j{i}", "a", age=9 - i) for i in range(4)]
    decisions = decide(nodes(9), cohort(a=8, b=16), *asked)
    assert admitted(decisions) == ["j0", "j1", "j2"]
    assert "The quota of cohort c has 0 GPUs of 24 GPUs left." in decisions.pending["j3"].message
    borrower, lender = decisions.queues
    assert borrower.borrowed.gpus == 16
    assert lender.borrowed.gpus == 0


def test_a_queue_outside_of_the_cohort_borrows_nothing():
    asked = [request(f"j{i}", "a", age=9 - i) for i in range(2)]
    decisions = decide(nodes(9), [queue("a", quota={"gpus": 8}), *cohort(b=16)], *asked)
    assert admitted(decisions) == ["j0"]


def test_borrowers_do_not_delay_a_head_with_a_reservation():
    queues = [queue("a", quota={"gpus": 4}, cohort="c"), *cohort(b=24), queue("z")]
    running = admitted_workload("z-1", "z", 2, seconds_left=3600)
    asked = [
        request("b-1", "b", 2),
        request("short", "a", age=9, seconds_left=60),
        request("long", "a", age=8),
    ]
    decisions = decide(nodes(3), queues, running, *asked)
    assert admitted(decisions) == ["short"]
    assert decisions.queues[0].borrowed.gpus == 4


def test_a_lender_reclaims_from_the_youngest():
    running = [
        admitted_workload("old", "a", admitted_for=300),
        admitted_workload("middle", "a", admitted_for=200),
        admitted_workload("young", "a", admitted_for=100),
        admitted_workload("own", "b", admitted_for=1),
    ]
    decisions = decide(nodes(9), cohort(a=8, b=24), *running, request("mine", "b", 2))
    assert [(p.uid, p.for_uid, p.reason) for p in decisions.preemptions] == [
        ("young", "mine", "Reclaimed"),
        ("middle", "mine", "Reclaimed"),
    ]
    assert "Preempted to return quota borrowed in cohort c" in decisions.preemptions[0].message
    assert decisions.pending["mine"].nominated
    assert decisions.pending["mine"].message == (
        "The job needs 16 GPUs on 2 nodes. Waiting for preempted jobs to stop: middle, young."
    )


def test_borrowers_of_high_priority_are_preempted_last():
    running = [
        admitted_workload("important", "a", admitted_for=1, priority=9),
        admitted_workload("small", "a", 1, 1, admitted_for=2),
        admitted_workload("large", "a", 2, admitted_for=3),
    ]
    decisions = decide(nodes(9), cohort(a=8, b=24), *running, request("mine", "b", 2))
    assert [p.uid for p in decisions.preemptions] == ["large"]


def test_queues_within_their_quota_are_not_preempted():
    running = [
        admitted_workload("a-1", "a"),
        admitted_workload("b-1", "b", 2),
        admitted_workload("z", "z"),
    ]
    queues = [*cohort(a=8, b=16), queue("z")]
    decisions = decide(nodes(4), queues, *running, request("more", "a"), request("z-2", "z", 4))
    assert decisions.preemptions == ()


def test_a_borrower_does_not_reclaim():
    running = [admitted_workload("a-1", "a", 2)]
    decisions = decide(nodes(9), cohort(a=8, b=8, d=8), *running, request("b-1", "b", 3))
    assert admitted(decisions) == []
    assert decisions.preemptions == ()
    assert decisions.pending["b-1"].reason == "InsufficientQuota"


def test_a_queue_without_a_limit_neither_lends_nor_borrows():
    queues = [queue("a", quota={"gpus": 8}, cohort="c"), queue("b", cohort="c")]
    asked = [request("b-1", "b", 4), request("a-1", "a"), request("a-2", "a")]
    decisions = decide(nodes(9), queues, *asked)
    assert admitted(decisions) == ["a-1", "b-1"]
    assert decisions.pending["a-2"].reason == "InsufficientQuota"


def test_an_admitted_job_counts_as_running_once_it_runs():
    workloads = [admitted_workload("r", "a", running=True), admitted_workload("s", "a")]
    (summary,) = decide(nodes(4), [queue("a")], *workloads, request("j", "a")).queues
    assert (summary.pending, summary.admitted, summary.running) == (0, 3, 1)


def test_paused_queues_admit_nothing_with_a_reason():
    queues = [queue("a", 0), queue("b", paused_reason="its quota is no quantity: many GPUs")]
    decisions = decide(
        nodes(9), queues, request("a-1", "a"), request("b-1", "b"), admitted_workload("h", "a")
    )
    assert admitted(decisions) == []
    assert decisions.pending["a-1"].reason == "QueuePaused"
    assert (
        decisions.pending["a-1"].message
        == "Queue a is paused because its weight is 0. Set it to 1 or more."
    )
    assert decisions.pending["b-1"].message == "its quota is no quantity: many GPUs"
    assert decisions.queues[0].message == decisions.pending["a-1"].message
    assert decisions.queues[0].admitted == 1


def test_a_job_of_a_queue_without_admission_only_uses_nodes():
    asked = [admitted_workload("h", "unknown"), request("u", "unknown"), request("a-1", "a", 2)]
    decisions = decide(nodes(2), [queue("a")], *asked)
    assert admitted(decisions) == []
    assert set(decisions.pending) == {"a-1"}


def test_only_borrowers_are_preempted_for_nodes():
    running = [
        admitted_workload("b-1", "b", admitted_for=9),
        admitted_workload("b-2", "b", admitted_for=8),
        admitted_workload("z-1", "z"),
    ]
    queues = [*cohort(a=16, b=16), queue("z")]
    decisions = decide(nodes(3), queues, *running, request("mine", "a"))
    assert decisions.preemptions == ()
    queues = [*cohort(a=16, b=8), queue("z")]
    decisions = decide(nodes(3), queues, *running, request("mine", "a"))
    assert [p.uid for p in decisions.preemptions] == ["b-2"]
    decisions = decide(nodes(3), queues, *running, request("mine", "a", 2))
    assert decisions.preemptions == ()
