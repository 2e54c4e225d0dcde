"""What a sync pod answers while it works on what it has received."""

import random
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from torchrun_runtime.sync.paths import PlannedPath
from torchrun_runtime.sync.tree import NewTree
from unit.runtime.syncing import archive, pod, settings

CODE = archive({"train.py": b"print('hello')", "pkg/data.bin": random.Random(0).randbytes(300_000)})


def test_reports_progress_while_it_extracts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives up a pod that seems to do nothing for minutes."""
    may_go_on = threading.Semaphore(0)
    write = NewTree.add_file

    def write_slowly(tree: NewTree, place: PlannedPath, pieces: Iterable[bytes]) -> None:
        may_go_on.acquire()
        write(tree, place, pieces)

    monkeypatch.setattr(NewTree, "add_file", write_slowly)
    with pod(settings(tmp_path / "claim")) as server:
        assert server.put(CODE)[0] == 202
        before = server.until("extracting")["progress"]
        may_go_on.release()
        while server.until("extracting")["progress"] == before:
            pass
        may_go_on.release()
        assert "progress" not in server.until("done")
