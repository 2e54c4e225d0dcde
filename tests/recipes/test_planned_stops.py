"""Each recipe, and the GPT, in a run of two nodes on this machine, which saves only when all ranks are asked to.

The ranks save on demand, continue from that checkpoint after one of them is killed, and lose no step
when the run has to end.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from recipes import environment
from recipes.test_recipes import (
    MANY,
    MORE,
    NAMES,
    RECIPES,
    RESUMED,
    ROOT,
    losses,
    resumed_steps,
)
from torchrun_runtime.launch.processes import descendants, variable

pytestmark = [
    pytest.mark.skipif(not environment.is_built(), reason="`make recipes` builds their Python"),
    pytest.mark.timeout(900),
]

PLUGIN = [sys.executable, "-m", "kubectl_torchrun"]
JOB = f"planned-{os.getpid()}"  # `checkpoint --local` looks among all runs of the machine
SECONDS = 500  # DeepSpeed compiles an extension at first
NEVER = f"--save-every {MANY}"
COMMANDS = {name: f"train_{name}.py {NEVER}" for name in NAMES} | {
    "memory": f"train_memory.py {NEVER} --remember-every {MANY}",
    "gpt": f"train.py --checkpoint-every {MANY} --log-every 1 --layers 2 --sample 0",
}
T = TypeVar("T")


def shell(folder: Path) -> dict[str, str]:
    """The variables of a user whose Python has the framework."""
    python = environment.interpreter()
    sources = ("api", "controller", "runtime", "plugin")
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in sources),
        "PYTHONWARNINGS": "ignore",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions"),  # DeepSpeed compiles one
        "TORCHRUN_BACKEND": "gloo",
    }


class Run:
    """`run --local` of a script, always with the same name, so that it continues the one before."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self._folder = folder
        self._log = folder / f"output-{steps}"
        source = ROOT / "examples" / "gpt" if name == "gpt" else RECIPES
        shutil.copytree(source, folder, dirs_exist_ok=True)
        command = f"python {COMMANDS[name]} --steps {steps}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*PLUGIN, *("run", "--local", "--nodes", "2", "--name", JOB), command],
                cwd=folder,
                env=shell(folder),
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, what: str, look: Callable[[str], T]) -> T:
        """What is found in the output, once it is true."""
        end = time.monotonic() + SECONDS
        while not (found := look(self.output)):
            assert time.monotonic() < end, f"{what}: {self.output}"
            assert self.process.poll() is None, f"{what}: {self.output}"
            time.sleep(0.1)
        return found

    def save(self) -> str:
        """Ask for a checkpoint; what the command prints."""
        asked = [*PLUGIN, "checkpoint", JOB, "--local"]
        ended = subprocess.run(
            asked, env=shell(self._folder), capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr + self.output
        return ended.stderr

    def ranks(self) -> list[int]:
        """Processes of torch, rank by rank."""
        pids = [process.pid for process in descendants(self.process.pid)]
        ranks = {variable(pid, "RANK"): pid for pid in reversed(pids) if variable(pid, "RANK")}
        return [ranks[rank] for rank in sorted(ranks)]


@contextmanager
def run(name: str, folder: Path, steps: int) -> Iterator[Run]:
    """Start it, and end it with the block."""
    started = Run(name, folder, steps)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGINT)
            started.process.wait(SECONDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_ranks_save_on_demand_resume_from_it_and_stop_without_loss(
    name: str, tmp_path: Path
) -> None:
    with run(name, tmp_path, MANY) as first:
        first.wait_for("steps", lambda output: all(len(losses(output, r)) > 3 for r in (0, 1)))
        shown = re.search(r"New checkpoint: step (\d+), (\S+)", first.save())
        assert shown
        saved = int(shown[1])
        first.wait_for("a later step", lambda output: max(losses(output, 0)) > saved + 1)
        os.kill(first.ranks()[1], signal.SIGKILL)
        resumed = first.wait_for("new ranks", lambda output: len(RESUMED.findall(output)) == 2)
        assert resumed
        assert f"resuming from step {saved}: {shown[2]}" in first.output
        assert resumed_steps(first.output) == {0: saved, 1: saved}
        later = first.output.rindex("resumed after")
        first.wait_for("steps", lambda output: len(losses(output[later:], 0)) > 3)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(SECONDS) == 130, first.output
        done = [max(losses(first.output[later:], rank)) for rank in (0, 1)]
    last = done[0]
    assert done == [last, last], "all ranks stop after the same step"
    with run(name, tmp_path, last + MORE) as second:
        assert second.process.wait(SECONDS) == 0, second.output
    assert resumed_steps(second.output) == {0: last, 1: last}, "a step is lost"
    assert sorted(losses(second.output, 0)) == list(range(last + 1, last + MORE + 1))
