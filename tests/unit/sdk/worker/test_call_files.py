"""Files of earlier calls in warm pods and on the PVC."""

from pathlib import Path

import pytest

from torchrun_sdk.serialization import unpack
from torchrun_sdk.spec import CALLS, FOLDER, RESULTS, STATE_FOLDER, Here, Result
from torchrun_sdk.worker.call_files import RankFiles, WarmPod

from ..call.test_gang import until
from ..pods import WAITS, frames
from .test_serve import bring, hang_up, hear, later


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("is_read", [True, False])
def test_results_of_earlier_calls_are_removed_after_their_client_has_read_them(
    make, tmp_path: Path, is_read: bool
) -> None:
    state = tmp_path / "state"
    pod = make("def f(): return 'x' * 1000", idle=WAITS)
    pod.rank(TORCHRUN_STATE_DIR=str(state))
    first = pod.collect()
    frames(first, Result)
    results = tmp_path / FOLDER / RESULTS
    hang_up(first)
    client = bring(pod, later("c2"), {"script.py": "def f(): return 2"})
    frames(client, Result)
    hang_up(client)
    if not is_read:
        until(lambda: not (results / "c2" / "0.running").exists())
        (results / "c2" / "0.taken").unlink()
    third = bring(pod, later("c3"), {"script.py": "def f(): return 3"}, 2)
    assert unpack(frames(third, Result)[-1].value) == 3
    assert ("0.left" in names(results / "c2")) != is_read
    assert "0.started" in names(results / "c2")
    assert "0.left" not in names(results / "c1")
    kept = ["c3"] if is_read else ["c2", "c3"]
    until(lambda: names(state / STATE_FOLDER) == kept)
    # A client that returns does not start its call again.
    here = hear(pod.collect("c1"), Here)
    assert isinstance(here, Here)
    assert here.has_call


def run_calls(folder: Path, *calls: int, world: int = 2) -> None:
    """Run calls whose client reads the outcome of each rank."""
    for call in calls:
        for rank in range(world):
            files = RankFiles(folder / f"{call}", rank)
            files.remove_read()
            files.log.touch()
            files.write_start("{}")
            files.write_outcome("{}")
            files.mark_read()


def test_the_files_of_each_call_are_removed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the PVC, each removal is a request to the storage."""
    state = tmp_path / "state"
    monkeypatch.setenv("TORCHRUN_STATE_DIR", str(state))
    unlink, rmdir = Path.unlink, Path.rmdir
    removed: list[Path] = []

    def remove(path: Path, missing_ok: bool = False) -> None:
        removed.append(path)
        unlink(path, missing_ok=missing_ok)

    def remove_folder(path: Path) -> None:
        removed.append(path)
        rmdir(path)

    monkeypatch.setattr(Path, "unlink", remove)
    monkeypatch.setattr(Path, "rmdir", remove_folder)
    run_calls(tmp_path / "calls", *range(20))
    folder = state / STATE_FOLDER / "0"
    files = [folder / name for name in ("0.started", "0.left", "1.started", "1.left")]
    assert sorted(path for path in removed if path.parent == folder) == sorted(files)
    assert removed.count(folder) <= 2
    assert removed.count(tmp_path / "calls" / "0" / "0.log") == 1
    assert names(state / STATE_FOLDER) == ["19"]
    left = {path.name for path in (tmp_path / "calls").glob("*/*.l*") if path.parent.name != "19"}
    assert left == set()


def test_a_call_that_could_not_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("TORCHRUN_STATE_DIR", str(state))
    run_calls(tmp_path / "calls", 0, world=1)
    kept = state / STATE_FOLDER / "0" / "0.left"
    kept.unlink()
    kept.mkdir()  # cannot be unlinked
    run_calls(tmp_path / "calls", 1, world=1)
    assert names(state / STATE_FOLDER) == ["0", "1"]
    kept.rmdir()
    run_calls(tmp_path / "calls", 2, world=1)
    assert names(state / STATE_FOLDER) == ["2"]


def test_the_arguments_of_earlier_calls_do_not_stay(tmp_path: Path) -> None:
    pod = WarmPod(tmp_path)
    for number in range(1, 12):
        pod.put(later(f"c{number}")._replace(number=number))
        assert pod.newest == (number, f"c{number}")
    # A rank may be about to read the one before.
    assert names(tmp_path / CALLS) == ["10-c10.json", "11-c11.json"]
