"""What those who wait are told."""

from queueing import NOW, admitted, decide, holds, nodes, queue, request
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


def test_a_head_learns_that_others_stop():
    running = holds("stops", "a", 2, preempted_for="deleted")
    wait = decide(nodes(2), [queue("a"), queue("b")], running, request("j", "b")).waits["j"]
    assert wait.reason == "Preempting"
    asked = [request("first", "a", nominated=True), request("second", "b", 2)]
    running = [holds("s1", "a", preempted_for="first"), holds("s2", "a", preempted_for="deleted")]
    waits = decide(nodes(3), [queue("a"), queue("b")], *running, *asked).waits
    assert waits["second"].reason in {"WaitingForNodes", "Preempting"}


def test_without_any_end_in_sight_the_text_ends_there():
    """All of the room is promised to one that waits for nobody that the head could name."""
    gang = holds("gang", "a", 2, placed={"n000": 1})
    other = holds("other", "b", placed={"n001": 1})
    decisions = decide(nodes(2), [queue("a"), queue("b")], gang, other, request("j", "b", 2))
    assert admitted(decisions) == []
    assert decisions.waits["j"].message.startswith(
        "1st in b, needs 16 GPUs on 2 nodes, 0 GPUs free"
    )
