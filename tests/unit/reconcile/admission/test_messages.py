"""What those who wait are told."""

from queueing import NOW, decide, holds, nodes, queue, request
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.state import State


def test_the_first_ten_are_told_where_they_stand():
    asked = [request(f"j{i:03}", "research", 2, age=999 - i) for i in range(111)]
    waits = decide(nodes(2), [queue("research")], holds("x", "research"), *asked).waits
    assert waits["j000"].message == (
        "1st in research, needs 16 GPUs on 2 nodes, 8 GPUs free, next: x ends or is preempted"
    )
    assert waits["j001"].message == (
        "2nd in research, needs 16 GPUs on 2 nodes; j000 is before it (WaitingForNodes)"
    )
    assert waits["j002"].message.startswith("3rd in research")
    assert waits["j009"].message.startswith("10th in research")
    assert waits["j010"].message == "more than 10 jobs are before it in research"
    assert waits["j110"].message == "more than 100 jobs are before it in research"
    assert [waits[f"j{i:03}"].position for i in range(111)] == list(range(1, 112))


def test_far_behind_the_words_stay_while_others_start():
    asked = tuple(request(f"j{i:03}", "a", age=999 - i) for i in range(60))
    before = admit(State(nodes=nodes(1), queues=(queue("a"),), requests=asked), NOW)
    after = admit(State(nodes=nodes(1), queues=(queue("a"),), requests=asked[3:]), NOW)
    changed = [
        r.uid for r in asked[4:] if before.waits[r.uid].message != after.waits[r.uid].message
    ]
    assert len(changed) <= 12


def test_a_head_that_lacks_quota_learns_that_others_stop():
    # Room is missing as well, so that nothing can be promised yet.
    running = [
        holds("stops", "a", preempted_for="deleted", placed={"n000": 1}),
        holds("other", "b", placed={"n001": 1}),
    ]
    queues = [queue("a", quota={"gpus": 16}), queue("b")]
    wait = decide(nodes(2), queues, *running, request("j", "a", 2)).waits["j"]
    assert wait.reason == "QuotaUsed"
    assert wait.message.endswith("8 GPUs of 16 GPUs are left of the quota, next: stops stops")
