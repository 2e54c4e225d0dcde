"""Files of earlier calls in warm pods and on the PVC."""

from pathlib import Path

import pytest

from torchrun_sdk.serialization import unpack
from torchrun_sdk.spec import FOLDER, RESULTS, STATE_FOLDER, Here, Result

from ..pods import WAITS, frames
from ..test_gang import until
from .test_serve import bring, hang_up, hear, later


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
