"""`checkpoint`: what the ranks agree on, line by line, and why they do not."""

import pytest

from kubectl_torchrun.errors import RUN_FAILED, ClusterProblem
from kubectl_torchrun.logs.checkpoint import SaveAnswer, _answers, show


class Lines:
    """A terminal that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_each_state_is_a_line() -> None:
    lines = Lines()
    answers = [SaveAnswer("asked"), SaveAnswer("committed", 52), SaveAnswer("done", 52)]
    assert show(answers, lines) == 0  # type: ignore[arg-type]
    assert lines.notes == [
        "Asking all ranks.",
        "All ranks save at call 52 of torchrun_progress.stopping().",
        "All ranks have passed call 52: they have saved, or save now, and go on.",
    ]


def test_a_refusal_says_why() -> None:
    lines = Lines()
    refused = SaveAnswer("refused", why="node 1: not every rank has called it")
    assert show([refused], lines) == RUN_FAILED  # type: ignore[arg-type]
    assert lines.notes == ["The ranks do not save: node 1: not every rank has called it."]


def test_the_answers_of_the_launcher_are_read_from_the_pod() -> None:
    line = '{"state": "done", "call": 7, "why": "", "number": 1}'
    assert list(_answers(["echo", line])) == [SaveAnswer("done", 7)]


def test_a_pod_without_an_answer_is_a_problem_with_the_last_line_of_its_error() -> None:
    with pytest.raises(ClusterProblem, match="pods is forbidden"):
        list(_answers(["sh", "-c", "echo first >&2; echo pods is forbidden >&2; exit 1"]))
