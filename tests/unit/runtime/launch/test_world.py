"""A gang whose processes train alone is reported in time, and one that forms a group is not."""

import os
import subprocess
from pathlib import Path

import pytest

from torchrun_runtime.launch import world
from torchrun_runtime.launch.gang.policy import RestartLimits
from torchrun_runtime.launch.gang.rounds import GangNode, OrderInbox, OwnLink, Rounds
from torchrun_runtime.launch.world import PATIENCE, TORCH_MARK, WORLD_MARK, WorldWatch
from unit.runtime.virtual_time import Clock


class Watched:
    """The watch of a gang of one node, its marks, and what it announced."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self._clock = folder, clock
        self.announced: list[bool] = []
        inbox = OrderInbox()
        link = OwnLink(GangNode(0, 1, "", 0, ""), RestartLimits(), inbox)
        self.rounds = Rounds(link, inbox, lambda: None)
        self._watch = WorldWatch(self.rounds, str(folder), self.announced.append)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self._clock.sleep(1)
            assert self._watch.check() is None
        self._watch.on_stop(leaving=False)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    clock = Clock()
    monkeypatch.setattr(world, "time", clock)
    return Watched(tmp_path, clock)


def test_training_alone_is_announced_within_a_minute(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    watched.pass_time(100)
    (watched.folder / TORCH_MARK).touch()
    watched.pass_time(PATIENCE)
    assert (watched.announced, capfd.readouterr().err) == ([], "")
    watched.pass_time(60 - PATIENCE)
    assert watched.announced == [True]
    assert "Warning: each process trains alone. Write the command as" in capfd.readouterr().err
    assert watched.rounds.trains_alone()


def test_a_late_group_withdraws_the_warning(watched: Watched) -> None:
    (watched.folder / TORCH_MARK).touch()
    watched.pass_time(100)
    (watched.folder / WORLD_MARK).touch()
    watched.pass_time(1)
    assert watched.announced == [True, False]
    (watched.folder / WORLD_MARK).unlink()  # another round starts
    watched.pass_time(100)
    assert not watched.rounds.trains_alone()


def test_a_rank_without_marks_is_found_by_its_environment(
    watched: Watched,
) -> None:
    (watched.folder / TORCH_MARK).touch()
    with subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}
    ) as rank:
        watched.pass_time(1)
        rank.kill()
    assert not watched.rounds.trains_alone()
