"""Whose turn it is: smooth weighted round robin over queues."""

from queueing import NOW, nodes, queue, request
from torchrun_controller.reconcile.admission.coordinator import admit
from torchrun_controller.reconcile.admission.state import State


def order(weights: dict[str, int], room: int, gpus: int = 8) -> str:
    state = State(
        nodes=nodes(room),
        queues=tuple(queue(name, weight) for name, weight in weights.items()),
        requests=tuple(
            request(f"{name}{i}", name, gpus=gpus, age=100 - i)
            for name in weights
            for i in range(9)
        ),
    )
    return " ".join(admitted.uid[0] for admitted in admit(state, NOW).admits)


def test_turns_are_taken_smoothly():
    assert order({"a": 5, "b": 1, "c": 1}, room=7) == "a a b a c a a"


def test_jobs_without_gpus_are_charged_by_their_nodes():
    assert order({"a": 5, "b": 1, "c": 1}, room=7, gpus=0).startswith("a a b a c a a")
