"""What the launcher of a node reads of its ranks, and what it reports about checkpoints."""

import json
import os
from pathlib import Path

import pytest

from torchrun_runtime.launch.checkpoints import (
    CheckpointReporter,
    describe,
    parse_candidates,
    read_saves,
    write_resume_file,
)
from torchrun_runtime.launch.gang.checkpoints import KEPT_SAVES, CompleteCheckpoint, Saved
from torchrun_runtime.launch.output import TerminationLog
from torchrun_runtime.launch.podinfo import read_predecessor
from unit.runtime.virtual_time import Clock

TIME = "2026-01-01T00:00:00.000000Z"
SECONDS = 1767225600.0  # the same
NEWEST = (CompleteCheckpoint(2, "/c/2", TIME), CompleteCheckpoint(1, "s3://b/1", TIME))


def entry(step: int, **more: object) -> dict[str, object]:
    body: dict[str, object] = {"step": step, "world": 4, "path": f"/c/{step}", "time": SECONDS}
    return {**body, "complete": False, **more}


def write(folder: Path, rank: object, *entries: object) -> None:
    (folder / f"checkpoint.{rank}").write_text(json.dumps(entries))


def test_the_saves_of_the_ranks_of_a_node_are_joined(tmp_path: Path) -> None:
    write(tmp_path, 0, entry(1), entry(2, complete=True))
    write(tmp_path, 1, entry(1, path="/other"))
    write(tmp_path, 10, entry(3))
    assert read_saves(str(tmp_path)) == (
        Saved(1, 4, (0, 1), "/c/1", TIME),
        Saved(2, 4, (0,), "/c/2", TIME, True),
        Saved(3, 4, (10,)),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"step": -1}, {"step": "1"}, {"step": 2**60}, {"world": None}, {"path": ""}, {"path": 1}),
        *({"path": "x" * 1025}, {"path": "/a\nb"}, {"path": "/\udcff"}, {"time": "x"}),
        *({"time": 1e300}, {"time": float("nan")}),
    ],
)
def test_invalid_entries_are_left_out(tmp_path: Path, wrong: dict[str, object]) -> None:
    write(tmp_path, 0, {**entry(1), **wrong}, entry(2), "x")
    write(tmp_path, "x", entry(4))
    (tmp_path / "checkpoint.1").write_text("{")
    (tmp_path / "checkpoint.2").mkdir()
    assert [saved.step for saved in read_saves(str(tmp_path))] == [2]


def test_a_rank_that_never_stops_saving_cannot_fill_the_messages(tmp_path: Path) -> None:
    for rank in range(8):
        write(tmp_path, rank, *(entry(step + 100 * rank) for step in range(50)))
    saves = read_saves(str(tmp_path))
    assert len(saves) == 16
    assert [saved.step for saved in saves[:KEPT_SAVES]] == [44, 45, 46, 47, 48, 49]


def test_the_resume_file_exists_only_if_there_is_a_checkpoint(tmp_path: Path) -> None:
    path = write_resume_file(str(tmp_path), None)
    assert path
    assert not os.path.exists(path)
    assert write_resume_file(str(tmp_path), NEWEST[0]) == path
    assert json.loads(Path(path).read_text()) == {"step": 2, "path": "/c/2"}
    assert write_resume_file("", NEWEST[0]) == ""


def test_the_annotation_is_read_as_the_kubelet_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    # fmt.Sprintf("%s=%q", name, value) of Go
    value = '[{"step": 3, "path": "/\\u00e4 \\"x\\"\\\\", "time": "T"}]'.replace("T", TIME)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    file.write_text(f'torchrun.ai/restarts-in-place="2 3"\ntorchrun.ai/checkpoints="{quoted}"\n')
    predecessor = read_predecessor(str(file))
    assert predecessor[:2] == (2, 3)
    assert predecessor.checkpoints == (CompleteCheckpoint(3, '/ä "x"\\', TIME),)


@pytest.mark.parametrize("text", ["", "x", "{}", '[{"step": 1}]', "[" * 5000, "[1, 2, 3, 4]"])
def test_an_annotation_that_is_not_valid_has_no_candidates(tmp_path: Path, text: str) -> None:
    assert parse_candidates(text) == ()
    file = tmp_path / "annotations"
    file.write_text(f'torchrun.ai/checkpoints="{text}"\n')
    assert read_predecessor(str(file)).checkpoints == ()


def has_news(report: CheckpointReporter) -> bool:
    """mypy takes a property for constant."""
    return report.has_news


class Controller:
    """Accepts reports, unless it is away."""

    def __init__(self) -> None:
        self.is_away = False
        self.got: list[list[int]] = []

    def send(self, body: bytes) -> bool:
        steps = [each["step"] for each in json.loads(body)["checkpoints"]]
        self.got += [] if self.is_away else [steps]
        return not self.is_away


def test_checkpoints_are_reported_at_once_and_again_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, controller = Clock(), Controller()
    monkeypatch.setattr("torchrun_runtime.launch.checkpoints.time", clock)
    newest: list[CompleteCheckpoint] = []
    report = CheckpointReporter(lambda: tuple(newest))
    report.send(controller.send)
    assert not controller.got
    newest[:] = NEWEST[1:]
    assert has_news(report)
    for _ in range(70):
        report.send(controller.send)
        clock.sleep(1)
    assert controller.got == [[1], [1]]
    assert not has_news(report)
    newest[:] = NEWEST
    report.send(controller.send)
    assert controller.got[2:] == [[2, 1]]


def test_a_refused_report_is_sent_again_later_and_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, controller = Clock(), Controller()
    monkeypatch.setattr("torchrun_runtime.launch.checkpoints.time", clock)
    report = CheckpointReporter(lambda: NEWEST)
    controller.is_away = True
    report.send(controller.send)
    controller.is_away = False
    clock.sleep(1)
    report.send(controller.send)
    assert not controller.got, "it is sent again after some seconds"
    report.send(controller.send, is_last=True)
    assert controller.got == [[2, 1]]


def message(tmp_path: Path, text: str, *newest: CompleteCheckpoint) -> dict[str, object]:
    path = tmp_path / "termination-log"
    path.write_bytes(b"")
    log = TerminationLog(str(path))
    log.checkpoints = lambda: describe(newest)
    if text:
        log.write({"reason": "Exception", "message": text})
    else:
        log.write_success()
    data = path.read_bytes()
    assert len(data) <= 4096
    return dict(json.loads(data)) if data else {}


def test_the_termination_message_has_the_checkpoints_also_after_a_success(tmp_path: Path) -> None:
    expected = [{"step": 2, "path": "/c/2", "time": TIME}]
    assert message(tmp_path, "no", NEWEST[0])["checkpoints"] == expected
    assert message(tmp_path, "", NEWEST[0]) == {"checkpoints": expected}
    assert message(tmp_path, "") == {}
    assert message(tmp_path, "no") == {"reason": "Exception", "message": "no"}


@pytest.mark.parametrize(
    ("text", "path", "kept", "characters"),
    [
        ("x" * 2000, "/" + "p" * 1000, 3, 600),
        ("x" * 2000, "/" + "ä" * 1000, 1, 600),
        ("\x01" * 2000, "/" + "p" * 1000, 1, 200),
        ("x" * 2000, "/" + "\U0001f600" * 1000, 0, 600),
    ],
)
def test_the_newest_checkpoint_stays_if_the_message_has_no_room_for_all(
    tmp_path: Path, text: str, path: str, kept: int, characters: int
) -> None:
    newest = (CompleteCheckpoint(step, f"{path}{step}", TIME) for step in (3, 2, 1))
    body = message(tmp_path, text, *newest)
    checkpoints = body.get("checkpoints", [])
    assert isinstance(checkpoints, list)
    assert [each["step"] for each in checkpoints] == [3, 2, 1][:kept]
    assert len(str(body["message"])) == characters
