"""Which jobs are preempted for which, and who gets the freed nodes."""

from typing import Any

import pytest
from msgspec.structs import replace

from queueing import admitted, admitted_workload, decide, nodes, queue, request
from torchrun_controller.reconcile.admission.model import Amounts


def preempted(decisions):
    return [(one.uid, one.for_uid) for one in decisions.preemptions]


def test_lower_priorities_of_the_queue_are_preempted_youngest_first():
    running = [
        admitted_workload("old", "a", admitted_for=300),
        admitted_workload("young", "a", admitted_for=100),
        admitted_workload("better", "a", admitted_for=1, priority=1),
        admitted_workload("other", "b", admitted_for=1),
    ]
    decisions = decide(
        nodes(4), [queue("a"), queue("b")], *running, request("vip", "a", priority=9)
    )
    assert preempted(decisions) == [("young", "vip")]
    assert decisions.preemptions[0].reason == "HigherPriority"
    assert decisions.preemptions[0].message == (
        "Preempted for team/vip, whose priority 9 is higher than 0."
    )
    assert decisions.pending["vip"].reason == "Preempting"
    assert decisions.pending["vip"].message == (
        "The job needs 8 GPUs on 1 node. Waiting for preempted jobs to stop: young."
    )


def test_a_job_that_need_not_give_way_is_charged_once():
    """The youngest is not enough; the next one alone is."""
    running = [
        admitted_workload("large", "a", 2, admitted_for=300),
        admitted_workload("small", "a", 1, admitted_for=100),
    ]
    decisions = decide(nodes(3), [queue("a")], *running, request("vip", "a", 2, priority=9))
    assert preempted(decisions) == [("large", "vip")]
    assert decisions.queues[0].used.nodes == 3, "of those that run"


def test_all_are_preempted_whose_nodes_are_needed():
    running = [admitted_workload(name, "a", pods_by_node={f"n00{name}": 1}) for name in "01"]
    decisions = decide(nodes(2), [queue("a")], *running, request("vip", "a", 2, priority=9))
    assert sorted(preempted(decisions)) == [("0", "vip"), ("1", "vip")]


def test_the_status_of_a_queue_counts_admitted_jobs_alone():
    """Its quota has room for one of both, the preempted job or the nominated one."""
    low, vip = admitted_workload("low", "a", 2), request("vip", "a", 2, priority=9)
    for jobs in ((low, vip), (replace(low, preempted_for="vip"), replace(vip, nominated=True))):
        decisions = decide(nodes(2), [queue("a", quota={"gpus": 24})], *jobs)
        assert decisions.pending["vip"].nominated
        (summary,) = decisions.queues
        assert summary.used == Amounts(nodes=2, gpus=16, jobs=1)
        assert (summary.free.gpus, summary.borrowed.gpus) == (8, 0)
        assert (summary.pending, summary.admitted) == (1, 1)


def test_no_preemption_if_it_is_not_enough():
    running = [admitted_workload("low", "a"), admitted_workload("other", "b", 3)]
    decisions = decide(
        nodes(4), [queue("a"), queue("b")], *running, request("vip", "a", 2, priority=9)
    )
    assert preempted(decisions) == []
    assert decisions.pending["vip"].reason == "WaitingForNodes"


def test_equal_priorities_are_not_preempted():
    decisions = decide(nodes(1), [queue("a")], admitted_workload("r", "a"), request("j", "a"))
    assert preempted(decisions) == []


def test_only_jobs_on_useful_nodes_are_preempted():
    machines = nodes(2)
    machines = (replace(machines[0], labels={"zone": "x"}), machines[1])
    running = [
        admitted_workload("elsewhere", "a", admitted_for=1, pods_by_node={"n001": 1}),
        admitted_workload("here", "a", admitted_for=99, pods_by_node={"n000": 1}),
    ]
    vip = request("vip", "a", priority=9, node_selector={"zone": "x"})
    assert preempted(decide(machines, [queue("a")], *running, vip)) == [("here", "vip")]


def test_jobs_on_any_node_are_preempted_for_quota():
    running = [admitted_workload("low", "a", admitted_for=1, pods_by_node={"n001": 1})]
    decisions = decide(
        nodes(9), [queue("a", quota={"jobs": 1})], *running, request("vip", "a", priority=1)
    )
    assert preempted(decisions) == [("low", "vip")]


STOPPING = (
    admitted_workload("stops", "a", preempted_for="vip", pods_by_node={"n000": 1}),
    request("vip", "a", priority=9, nominated=True, age=1),
)


def test_freed_nodes_are_reserved_for_the_preempting_job():
    queues = [queue("a", 1), queue("b", 9)]
    other = request("b-1", "b", age=99, seconds_left=1)
    decisions = decide(nodes(1), queues, *STOPPING, other)
    assert admitted(decisions) == []
    assert preempted(decisions) == []
    assert decisions.pending["vip"].nominated
    gone = replace(STOPPING[0], admitted=0, pods_by_node={}, preempted_for="")
    decisions = decide(nodes(1), queues, gone, STOPPING[1], other)
    assert admitted(decisions) == ["vip"]
    assert decisions.queues[0].round_robin.current < 0


def test_a_reservation_ends_if_nothing_is_freed():
    vip = STOPPING[1]
    decisions = decide(nodes(1), [queue("a"), queue("b")], admitted_workload("r", "b"), vip)
    assert not decisions.pending["vip"].nominated
    assert decisions.pending["vip"].reason == "WaitingForNodes"


def test_a_paused_queue_has_no_reservation():
    decisions = decide(nodes(2), [queue("a", 0)], STOPPING[1])
    assert admitted(decisions) == []
    assert not decisions.pending["vip"].nominated


def test_nodes_freed_for_a_deleted_job_are_used():
    """The preempting job was deleted. The next job needs no further preemption."""
    running = [
        admitted_workload("stops", "a", preempted_for="deleted", admitted_for=50),
        admitted_workload("low", "a", admitted_for=1),
    ]
    decisions = decide(nodes(2), [queue("a")], *running, request("vip", "a", priority=9))
    assert preempted(decisions) == []
    assert decisions.pending["vip"].nominated
    assert decisions.pending["vip"].message.endswith("Waiting for preempted jobs to stop: others.")


def test_two_heads_have_separate_victims():
    running = [
        admitted_workload("l1", "a", admitted_for=1),
        admitted_workload("l2", "a", admitted_for=2),
        admitted_workload("l3", "a", admitted_for=3),
    ]
    asked = [request("v1", "a", priority=9, age=9), request("v2", "a", priority=9, age=8)]
    decisions = decide(nodes(3), [queue("a")], *running, *asked)
    assert preempted(decisions) == [("l1", "v1"), ("l2", "v2")]


def test_a_head_behind_a_reservation_can_preempt_without_delaying_it():
    queues = [queue("a", 9), queue("b", 1)]
    running = [admitted_workload("a-r", "a", 2, admitted_for=9), admitted_workload("b-low", "b", 1)]
    asked = [request("a-head", "a", 3), request("b-vip", "b", priority=9)]
    decisions = decide(nodes(4), queues, *running, *asked)
    assert preempted(decisions) == [("b-low", "b-vip")]
    assert decisions.pending["a-head"].reason == "WaitingForNodes"
    stops = admitted_workload("stops", "a", preempted_for="deleted", pods_by_node={"n003": 1})
    wide = request("a-head", "a", 4)
    decisions = decide(nodes(5), queues, *running, stops, wide, asked[1])
    assert preempted(decisions) == [("b-low", "b-vip")]
    # Here the other head needs the same nodes, for an unknown time.
    decisions = decide(nodes(3), queues, *running, *asked)
    assert preempted(decisions) == []
    assert decisions.pending["b-vip"].reason == "WaitingForNodes"


def test_a_preempted_job_uses_its_quota_until_it_has_ended():
    queues = [queue("a", quota={"gpus": 8})]
    running = admitted_workload("stops", "a", preempted_for="vip")
    decisions = decide(nodes(9), queues, running, request("vip", "a", nominated=True, priority=1))
    assert admitted(decisions) == []
    assert decisions.pending["vip"].nominated


def test_a_terminating_job_of_a_deleted_queue_counts():
    running = admitted_workload("stops", "gone", preempted_for="deleted")
    decisions = decide(nodes(1), [queue("a")], running, request("j", "a"))
    assert decisions.pending["j"].nominated


def test_gangs_of_deleted_jobs_are_not_preempted():
    """Without a status its pods cannot be preempted, so their end is waited for."""
    running = admitted_workload("gone", "a", is_deleted=True, pods_by_node={"n000": 1})
    decisions = decide(nodes(1), [queue("a")], running, request("vip", "a", priority=9))
    assert preempted(decisions) == []
    assert decisions.pending["vip"].reason == "WaitingForNodes"


def test_a_gang_whose_status_cannot_be_written_is_not_preempted():
    running = admitted_workload("stuck", "a", is_fixed=True)
    decisions = decide(nodes(1), [queue("a")], running, request("vip", "a", priority=9))
    assert preempted(decisions) == []
    assert decisions.pending["vip"].reason == "WaitingForNodes"


def test_a_nominated_job_looks_for_others_if_its_victim_is_deleted():
    deleted = admitted_workload("deleted", "a", is_deleted=True, pods_by_node={"n000": 1})
    low = admitted_workload("low", "a", pods_by_node={"n001": 1})
    vip = request("vip", "a", priority=9, nominated=True)
    decisions = decide(nodes(2), [queue("a")], deleted, low, vip)
    assert preempted(decisions) == [("low", "vip")]
    assert decisions.pending["vip"].nominated


HOUR = 3600.0


def ran(hours: float, unsaved: float | None = None, **fields: Any) -> dict[str, Any]:
    """A gang that ran for so many hours, and has saved a checkpoint `unsaved` hours ago."""
    seconds = None if unsaved is None else unsaved * HOUR
    return {"ran_seconds": hours * HOUR, "unsaved_seconds": seconds, "running": True, **fields}


# Jobs of one priority, the youngest last, and who is preempted for a job that needs one node.
@pytest.mark.parametrize(
    ("running", "victim"),
    [
        pytest.param({"a": ran(3, 0.5), "b": ran(2, 0.1), "c": ran(1, 0.9)}, "b", id="checkpoint"),
        pytest.param({"a": ran(9), "b": ran(8), "c": ran(1, 0.9)}, "c", id="others report none"),
        pytest.param({"a": ran(3), "b": ran(2), "c": ran(1)}, "c", id="none reports"),
        pytest.param({"a": ran(8), "b": ran(3, 2.9), "c": ran(2, 1.9)}, "c", id="median 3 h"),
        pytest.param({"a": ran(8), "b": ran(3, 3.0), "c": ran(9, 4.0)}, "b", id="the median"),
        pytest.param(
            {
                "a": ran(9),
                "b": ran(8, 7.9),
                **{name: ran(1, 1, preemptions=2) for name in ("c", "d")},
            },
            "a",
            id="no longer than the median",
        ),
        pytest.param({"a": ran(9, 0.5), "b": ran(0), "c": ran(1, 0.1)}, "b", id="does not run"),
        pytest.param({"a": ran(1, 0.2), "b": ran(1, 0.2)}, "b", id="as much: the youngest"),
        pytest.param(
            {"a": ran(3, 0.1, preemptions=2), "b": ran(2, 0.9), "c": ran(1, 1)}, "b", id="twice"
        ),
        pytest.param({"a": ran(3, 0.1, preemptions=1), "b": ran(2, 0.9)}, "a", id="once"),
        pytest.param({"a": ran(3, 0.1, preemptions=9)}, "a", id="nobody else"),
        pytest.param({"a": ran(3, 0.0, priority=1), "b": ran(2, 2.0)}, "b", id="a priority counts"),
        pytest.param(
            {"a": ran(3, 0.0, protected_seconds=60.0), "b": ran(2, 2.0)}, "b", id="minRunSeconds"
        ),
    ],
)
@pytest.mark.parametrize("is_reclaim", [False, True])
def test_who_loses_least_is_preempted(
    running: dict[str, dict[str, Any]], victim: str, is_reclaim: bool
):
    if is_reclaim:
        spare = 8 * (len(running) - 1)
        queues = [
            queue("a", quota={"gpus": spare}, cohort="c"),
            queue("b", quota={"gpus": 8}, cohort="c"),
        ]
    else:
        queues = [queue("a")]
    head = request("vip", "b" if is_reclaim else "a", priority=9)
    jobs = [
        admitted_workload(name, "a", admitted_for=900 - number, **fields)
        for number, (name, fields) in enumerate(running.items())
    ]
    decisions = decide(nodes(len(jobs)), queues, *jobs, head)
    assert preempted(decisions) == [(victim, "vip")]


def test_the_loss_counts_all_gpus():
    running = [
        admitted_workload("large", "a", 4, **ran(1, 0.2)),
        admitted_workload("small", "a", 1, **ran(1, 0.5)),
    ]
    decisions = decide(nodes(5), [queue("a")], *running, request("vip", "a", priority=9))
    assert preempted(decisions) == [("small", "vip")]


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_gang_that_has_just_started_is_looked_at_again(is_pending: bool):
    running = [
        admitted_workload("a", "a", protected_seconds=50.0, **ran(1)),
        admitted_workload("b", "a", protected_seconds=20.0, **ran(2)),
    ]
    heads = [request("vip", "a", priority=9)] if is_pending else []
    decisions = decide(nodes(2), [queue("a")], *running, *heads)
    assert preempted(decisions) == []
    assert decisions.requeue_after == (20.0 if is_pending else None)


@pytest.mark.parametrize(
    ("fields", "gpus", "loss"),
    [
        (ran(2, 0.025, saved_step=1200), 8, " It loses about 12 GPU minutes since its checkpoint of step 1200."),
        (ran(2, 2, saved_step=1200), 8, " It loses about 960 GPU minutes since it resumed from its checkpoint of step 1200."),
        (ran(2, 0.0, saved_step=7), 8, " It loses at most one GPU minute since its checkpoint of step 7."),
        (ran(2), 8, " It loses about 960 GPU minutes, unless it has saved a checkpoint: it reports none."),
        (ran(2), 0, " It loses about 120 node minutes, unless it has saved a checkpoint: it reports none."),
        (ran(0), 8, ""),
    ],
)  # fmt: skip
def test_the_message_says_what_is_lost(fields: dict[str, Any], gpus: int, loss: str):
    vip = request("vip", "a", gpus=gpus, priority=9)
    low = admitted_workload("low", "a", gpus=gpus, **fields)
    decisions = decide(nodes(1), [queue("a", quota={"jobs": 1})], low, vip)
    (preemption,) = decisions.preemptions
    assert preemption.message == (
        f"Preempted for team/vip, whose priority 9 is higher than 0.{loss}"
    )
