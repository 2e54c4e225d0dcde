"""stopping() in a training script, with the launcher's side of the memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.rank import _torchrun_stopping as calls
from torchrun_runtime.launch.stopping import SharedMemory
from unit.runtime.launching import FOLDER, PYTHONS

pytestmark = pytest.mark.long  # processes


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    return SharedMemory(str(tmp_path))


def start(
    python: str, folder: "Path | str", program: str, **environment: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [python, "-c", f"import torchrun_progress as t\n{program}"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(FOLDER / "rank"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHRUN_LAUNCH_REPORTS": str(folder),
            **environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(python: str, folder: "Path | str", program: str, **environment: str) -> str:
    process = start(python, folder, program, **environment)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out.strip()


@pytest.mark.parametrize("folder", ["", "/nonexistent"])
def test_outside_of_a_job_it_never_stops(python: str, folder: str) -> None:
    assert run(python, folder, "print(t.stopping(), t.save_requested())") == "None False"


def test_a_rank_takes_part_from_its_first_call_on(
    python: str, tmp_path: Path, memory: SharedMemory
) -> None:
    process = start(
        python, tmp_path, "print(); input(); t.stopping(); print(); input()", LOCAL_WORLD_SIZE="1"
    )
    assert process.stdin
    assert process.stdout
    process.stdout.readline()
    assert memory.read() == "not every rank has called torchrun_progress.stopping()"
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    slots = memory.read()
    assert isinstance(slots, list)
    assert [(slot.call, slot.phase) for slot in slots] == [(1, calls.LEFT)]
    process.communicate("\n")
    assert isinstance(memory.read(), str), "a rank that has ended takes no part"


def test_a_node_waits_for_all_of_its_ranks(
    python: str, tmp_path: Path, memory: SharedMemory
) -> None:
    program = "t.stopping(); print(); input()"
    process = start(python, tmp_path, program, RANK="0", LOCAL_WORLD_SIZE="2")
    assert process.stdout
    process.stdout.readline()
    assert isinstance(memory.read(), str)
    process.communicate("\n")


def test_the_answer_comes_at_the_call_and_stays(
    python: str, tmp_path: Path, memory: SharedMemory
) -> None:
    import time

    memory.write(calls.pack_word(1, 3, calls.STOPS), time.monotonic() + 100)
    program = "print([(t.stopping() or 0) // 50 for _ in range(5)])"
    assert run(python, tmp_path, program) == "[0, 0, 1.0, 1.0, 1.0]"
    assert memory.have_been_told()


def test_a_save_is_requested_at_the_call_only(
    python: str, tmp_path: Path, memory: SharedMemory
) -> None:
    memory.write(calls.pack_word(1, 3, calls.SAVES), 0)
    program = "print([(t.stopping(), t.save_requested())[1] for _ in range(5)])"
    assert run(python, tmp_path, program) == "[False, False, True, False, False]"


def test_children_of_a_rank_take_no_part(python: str, tmp_path: Path, memory: SharedMemory) -> None:
    import time

    memory.write(calls.pack_word(1, 2, calls.STOPS), time.monotonic() + 100)
    program = """
import os
t.stopping()
if os.fork() == 0:
    print(t.stopping(), flush=True)
    os._exit(0)
os.wait()
print(t.stopping() > 0)
"""
    assert run(python, tmp_path, program) == "None\nTrue"


def test_a_rank_goes_on_if_the_proposal_is_withdrawn(
    python: str, tmp_path: Path, memory: SharedMemory
) -> None:
    memory.write(calls.pack_word(1, 2, calls.PROPOSED), 0)
    process = start(python, tmp_path, "t.stopping(); print(flush=True); print(t.stopping())")
    assert process.stdout
    process.stdout.readline()
    while [(slot.call, slot.phase) for slot in memory.read()] != [(2, calls.WAITS)]:  # type: ignore[union-attr]
        assert process.poll() is None
    memory.write(calls.pack_word(2, 0, calls.NONE), 0)
    assert process.communicate()[0].strip() == "None"


def test_a_rank_waits_for_a_limited_time(python: str, tmp_path: Path, memory: SharedMemory) -> None:
    memory.write(calls.pack_word(1, 1, calls.PROPOSED), 0)
    program = "import _torchrun_stopping as s; s.WAIT_SECONDS = 0.2; print(t.stopping())"
    assert run(python, tmp_path, program) == "None"
