"""torchrun_progress in a training script."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from unit.runtime.launching import FOLDER, PYTHONS

pytestmark = pytest.mark.long  # processes


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(python: str, folder: "Path | str", program: "str | Path", **environment: str) -> str:
    is_file = isinstance(program, Path)
    ended = subprocess.run(
        [python, str(program)] if is_file else [python, "-c", textwrap.dedent(str(program))],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(FOLDER / "rank"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHRUN_LAUNCH_REPORTS": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def files(folder: Path) -> "list[str]":
    """The files without those that each Python leaves there."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("python."))


def test_rank_0_writes_its_last_values(python: str, tmp_path: Path) -> None:
    text = """
        from torchrun_progress import report
        for step in range(1, 1001): report(step=step, total=1000, loss=1 / step)
        report(samples_per_second=80)
    """
    run(python, tmp_path, text, RANK="0")
    assert json.loads((tmp_path / "progress").read_text()) == {
        "step": 1000,
        "totalSteps": 1000,
        "loss": 0.001,
        "samplesPerSecond": 80.0,
    }
    assert files(tmp_path) == ["beat.0", "progress"]


def test_other_ranks_write_a_heartbeat_only(python: str, tmp_path: Path) -> None:
    run(python, tmp_path, "import torchrun_progress as t; t.report(step=1)", RANK="3")
    assert files(tmp_path) == ["beat.3"]
    assert (tmp_path / "beat.3").stat().st_size == 1


def test_an_import_is_no_heartbeat(python: str, tmp_path: Path) -> None:
    text = """
        import os, torchrun_progress
        print(os.path.getsize(os.environ["TORCHRUN_LAUNCH_REPORTS"] + "/beat.0"))
    """
    assert run(python, tmp_path, text) == "0\n"


@pytest.mark.parametrize("folder", ["", "/proc/none"], ids=["outside", "unwritable"])
def test_never_disturbs_the_training(python: str, folder: str) -> None:
    text = """
        from torchrun_progress import report
        class Bad:
            def __float__(self): raise RuntimeError("on another device")
        report(step="many", total=Bad(), loss=float("nan"), samples_per_second=[])
        print("trained")
    """
    assert run(python, folder, text) == "trained\n"


def test_non_finite_numbers_are_dropped(python: str, tmp_path: Path) -> None:
    text = """
        from torchrun_progress import report
        report(step=7, total="x", loss=float("nan"), samples_per_second=float("inf"))
    """
    run(python, tmp_path, text)
    assert json.loads((tmp_path / "progress").read_text()) == {"step": 7}


def test_a_multiprocessing_worker_does_not_touch_the_heartbeat_of_its_parent(
    python: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, torchrun_progress
            def work(): import torchrun_progress
            if __name__ == "__main__":
                torchrun_progress.report(step=1)
                worker = multiprocessing.get_context("spawn").Process(target=work)
                worker.start(); worker.join()
                print(os.path.getsize(os.environ["TORCHRUN_LAUNCH_REPORTS"] + "/beat.0"), flush=True)
                os._exit(0)
            """
        )
    )
    assert run(python, tmp_path, script) == "1\n"


def test_a_call_in_each_step_costs_microseconds(tmp_path: Path) -> None:
    text = """
        import time
        from torchrun_progress import report
        report(step=0)
        start = time.process_time()
        for step in range(100_000): report(step=step, total=100_000, loss=1.5)
        print((time.process_time() - start) / 100_000)
    """
    seconds = float(run(sys.executable, tmp_path, text))
    assert seconds < 50e-6, "50 times the measured time, for a busy machine"
