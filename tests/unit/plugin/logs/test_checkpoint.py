"""`checkpoint`: what the ranks agree on, line by line, and why they do not."""

import pytest

from kubectl_torchrun.cluster.slices import CheckpointSlice
from kubectl_torchrun.errors import RUN_FAILED, ClusterProblem, Problem
from kubectl_torchrun.logs import checkpoint
from kubectl_torchrun.logs.checkpoint import SaveAnswer, _answers, follow


class Lines:
    """A terminal that keeps what it is told, and what it waits for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waits: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def waiting(self, phase: str, text: str, seconds: float) -> None:
        self.waits.append(phase)

    def at_rest(self) -> None:
        pass


OLD, NEW = CheckpointSlice(step=40, path="/checkpoints/40"), CheckpointSlice(step=52, path="/c/52")
ASKED, COMMITTED, DONE, LATE = (
    SaveAnswer("asked"),
    SaveAnswer("committed", 52),
    SaveAnswer("done", 52),
    SaveAnswer("late"),
)


def asked(answers: list[SaveAnswer], *states: CheckpointSlice, seconds: float = 60) -> Lines:
    """The output of a request. states: the last checkpoint at each look."""
    lines, looks = Lines(), iter(states)
    follow(answers, lambda: next(looks, states[-1]), seconds, "stacks", lines)  # type: ignore[arg-type]
    return lines


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.0)


def test_each_state_is_a_line_and_then_the_new_checkpoint() -> None:
    lines = asked([ASKED, COMMITTED, COMMITTED, DONE], OLD, OLD, NEW)
    assert lines.notes == [
        "Asking all ranks.",
        "All ranks save at call 52 of torchrun_progress.stopping().",
        "All ranks have passed call 52: they have saved, or save now, and go on.",
        "New checkpoint: step 52, /c/52",
    ]
    assert lines.waits == ["Not all ranks have passed call 52", "No new checkpoint was reported"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [ASKED, SaveAnswer("refused", why="node 1: not every rank has called it")],
            "The ranks do not save: node 1: not every rank has called it.",
        ),
        (
            [ASKED, LATE],
            "The ranks have not agreed on a call within 0.01 s. Look for a rank that hangs: stacks",
        ),
        (
            [ASKED, COMMITTED, LATE],
            "Not all ranks have passed call 52 within 0.01 s. Look for a rank that hangs: stacks",
        ),
        (
            [ASKED, COMMITTED, DONE],
            "No new checkpoint was reported within 0.01 s. After a save, each rank calls"
            " torchrun_progress.checkpoint(step, path). If saves take longer, set --timeout.",
        ),
    ],
    ids=["refused", "no agreement", "a rank hangs", "no checkpoint"],
)
def test_a_request_without_a_checkpoint_fails_and_says_what_to_do(
    answers: list[SaveAnswer], message: str
) -> None:
    with pytest.raises(Problem) as problem:
        asked(answers, OLD, seconds=0.01)
    assert (str(problem.value), problem.value.exit_code) == (message, RUN_FAILED)


def test_the_answers_of_the_launcher_are_read_from_the_pod() -> None:
    line = '{"state": "done", "call": 7, "why": "", "number": 1}'
    assert list(_answers(["echo", line], 60)) == [SaveAnswer("done", 7)]


def test_a_pod_without_an_answer_is_a_problem_with_the_last_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ClusterProblem, match="pods is forbidden"):
        list(_answers(["sh", "-c", "echo first >&2; echo pods is forbidden >&2; exit 1"], 60))
    monkeypatch.setattr(checkpoint, "_SPARE_SECONDS", 0.0)
    with pytest.raises(ClusterProblem, match="has not answered"):
        list(_answers(["sleep", "3600"], 0.01))
