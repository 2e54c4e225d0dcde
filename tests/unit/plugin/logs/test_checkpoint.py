"""`checkpoint`: what the ranks agree on, line by line, and why they do not."""

import pytest

from kubectl_torchrun.cluster.slices import CheckpointSlice
from kubectl_torchrun.errors import RUN_FAILED, ClusterProblem
from kubectl_torchrun.logs import checkpoint
from kubectl_torchrun.logs.checkpoint import SaveAnswer, _answers, await_checkpoint, show


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


OLD, NEW = CheckpointSlice(step=40, path="/checkpoints/40"), CheckpointSlice(step=52, path="/c/52")


def test_the_new_checkpoint_is_named_once_the_status_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.0)
    lines, states = Lines(), iter([OLD, OLD, NEW])
    await_checkpoint(lambda: next(states), OLD, lines)  # type: ignore[arg-type]
    assert lines.notes == ["New checkpoint: step 52, /c/52"]


def test_a_job_that_reports_no_checkpoints_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.0)
    monkeypatch.setattr(checkpoint, "_FIRST_SECONDS", 0.01)
    lines = Lines()
    await_checkpoint(lambda: None, None, lines)  # type: ignore[arg-type]
    assert "torchrun_progress.checkpoint(step, path)" in lines.notes[0]
