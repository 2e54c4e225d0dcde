"""`sync`: what follows an upload to a job that runs, or a new fetch."""

import pytest

from kubectl_torchrun.upload import sync

from ..laptop import READY, Laptop
from .test_reload import play_controller
from .test_submission import interrupt_at

pytestmark = pytest.mark.long  # processes

GIT = {"volumes": {"workspace": {"source": "git", "url": "https://git.example/a.git"}}}


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--wait=Running"], 0), (["--wait=Succeeded", "--timeout", "0.2s"], 5)],
)
def test_the_wait_begins_after_the_upload(laptop: Laptop, words: list[str], code: int) -> None:
    play_controller(laptop)
    result = laptop.run("sync", "run", *words)
    assert result.exit_code == code, result.output
    assert "Revision 1: 1 file," in result.stderr


def test_a_new_fetch_is_followed_by_the_wait(laptop: Laptop) -> None:
    laptop.job("run", spec=GIT, status={"phase": "Queued"})
    result = laptop.run("sync", "run", "--wait=Succeeded", "--timeout", "0.2s")
    assert result.exit_code == 5, result.output
    assert "Job run fetches its workspace from git again now." in result.stderr


def test_a_fetch_without_a_result_is_reported(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_FETCH_SECONDS", 0.2)
    laptop.job("run", spec=GIT, status={"phase": "Running", "conditions": READY})
    result = laptop.run("sync", "run")
    assert result.exit_code == 3, result.output
    assert "did not finish within 0 s and continues. See: kubectl torchrun why run -n ns" in (
        result.stderr
    )


def test_ctrl_c_ends_the_wait(laptop: Laptop) -> None:
    laptop.job("run", spec=GIT, status={"phase": "Queued"})
    interrupt_at(laptop.server, "/pods")
    result = laptop.run("sync", "run", "--wait")
    assert result.exit_code == 130
    assert "Job run continues. kubectl torchrun status run -n ns" in result.stderr
