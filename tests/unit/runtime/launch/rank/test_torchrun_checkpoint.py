"""torchrun_progress.checkpoint and resume in a training script."""

import json
from pathlib import Path

import pytest

from torchrun_runtime.launch.checkpoints import read_saves
from unit.runtime.launch.rank.test_torchrun_progress import files, python, run

__all__ = ["python"]  # the fixture

pytestmark = pytest.mark.long  # processes


def test_the_last_saves_of_a_rank_are_kept(python: str, tmp_path: Path) -> None:
    text = """
        import pathlib, torchrun_progress
        for step in range(1, 9): torchrun_progress.checkpoint(step, pathlib.Path("ckpt") / str(step))
        torchrun_progress.checkpoint(7, "s3://bucket/7", complete=True)
    """
    run(python, tmp_path, text, RANK="0", WORLD_SIZE="4")
    saves = read_saves(str(tmp_path))
    assert [saved.step for saved in saves] == [3, 4, 5, 6, 8, 7]
    assert saves[-2].path == f"{Path.cwd()}/ckpt/8"
    assert (saves[-1].path, saves[-1].is_complete, saves[-1].world) == ("s3://bucket/7", True, 4)


def test_only_rank_0_can_say_that_all_is_saved(python: str, tmp_path: Path) -> None:
    text = "import torchrun_progress as t; t.checkpoint(1, '/x', complete=True)"
    run(python, tmp_path, text, RANK="1", WORLD_SIZE="2")
    (saved,) = json.loads((tmp_path / "checkpoint.1").read_text())
    assert saved["complete"] is False


def test_without_a_launcher_of_ranks_each_node_is_one(python: str, tmp_path: Path) -> None:
    text = "import torchrun_progress as t; t.checkpoint(1, '/x')"
    run(python, tmp_path, text, NODE_RANK="1", NNODES="3", WORLD_SIZE="9")
    (saved,) = json.loads((tmp_path / "checkpoint.1").read_text())
    assert saved["world"] == 3


@pytest.mark.parametrize(
    "arguments", ["-1, '/x'", "'a', '/x'", "None, None", "1, 5", "1, '/' + 'x' * 1024", "1, '/\\n'"]
)
def test_a_call_that_is_not_valid_writes_one_line_and_does_not_raise(
    python: str, tmp_path: Path, arguments: str
) -> None:
    text = f"""
        import contextlib, io, torchrun_progress
        with contextlib.redirect_stderr(io.StringIO()) as lines:
            torchrun_progress.checkpoint({arguments})
        assert lines.getvalue().startswith("torchrun_progress: the checkpoint is not reported: ")
        assert lines.getvalue().count("\\n") == 1
    """
    run(python, tmp_path, text, RANK="0")
    assert files(tmp_path) == ["beat.0"]


def test_a_checkpoint_alone_does_not_start_the_hang_watch(python: str, tmp_path: Path) -> None:
    """A training that calls nothing else is silent between two checkpoints."""
    run(python, tmp_path, "import torchrun_progress as t; t.checkpoint(1, '/x')", RANK="0")
    assert (tmp_path / "beat.0").read_bytes() == b""


def test_outside_of_a_job_nothing_happens(python: str, tmp_path: Path) -> None:
    text = """
        import torchrun_progress as t
        t.checkpoint(1, "x")
        t.checkpoint("no", None)
        assert t.resume() is None
    """
    run(python, "", text, RANK="0")


def test_the_ranks_read_what_they_resume_from(python: str, tmp_path: Path) -> None:
    file = tmp_path / "resume.json"
    text = (
        "import torchrun_progress as t; last = t.resume(); print(last and (last.step, last.path))"
    )
    assert run(python, tmp_path, text, TORCHRUN_RESUME_FILE=str(file)) == "None\n"
    file.write_text(json.dumps({"step": 3, "path": "/c/3"}))
    assert run(python, tmp_path, text, TORCHRUN_RESUME_FILE=str(file)) == "(3, '/c/3')\n"
    file.write_text("[")
    assert run(python, tmp_path, text, TORCHRUN_RESUME_FILE=str(file)) == "None\n"
