"""Running the launcher as a pod does: a process of its own, on the Python of the image."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import coverage

import torchrun_runtime.launch
from ports import free_port
from torchrun_runtime.launch.processes import descendants, send

FOLDER = Path(torchrun_runtime.launch.__file__).parent

# Other interpreters to run the tests under as well, separated by ':'.
PYTHONS = [
    sys.executable,
    *filter(None, os.environ.get("TORCHRUN_TEST_PYTHONS", "").split(os.pathsep)),
]

ROOT = Path(__file__).parents[3]
SECONDS = 300  # of a wait for another process; long, for a busy machine


def measured() -> dict[str, str]:
    """The environment with which coverage measures a child process; empty without coverage."""
    if coverage.Coverage.current() is None:
        return {}
    data = os.environ.get("COVERAGE_FILE", str(ROOT / ".coverage"))
    return {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "COVERAGE_FILE": data}


@contextmanager
def unread_pipe() -> Iterator[int]:
    """The end to write of a full pipe that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@dataclass
class Launched:
    """A running launcher. Lines of its stdout can be read one by one."""

    process: "subprocess.Popen[str]"
    termination_log: Path

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> "Result":
        out, err = self.process.communicate(timeout=SECONDS)
        text = self.termination_log.read_text() if self.termination_log.exists() else ""
        return Result(self.process.returncode, out, err, json.loads(text) if text else {})


@dataclass(frozen=True)
class Result:
    """How a launcher ended."""

    exit_code: int
    out: str
    err: str
    message: "dict[str, object]"


@dataclass(frozen=True)
class Launcher:
    """Starts launchers. `directory` has the termination message and the files of the command."""

    python: str
    directory: Path
    folder: "Path | None" = None
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, command: "str | list[str]", *arguments: str, **environment: str) -> Launched:
        log = self.directory / "termination-log"
        log.touch()
        process = subprocess.Popen(
            [self.python, *self._entry(), *arguments],
            env={**self._environment(log), "TORCHRUN_COMMAND": json.dumps(command), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            start_new_session=True,
        )
        self.started.append(process)
        return Launched(process, log)

    def clear(self) -> None:
        """Kill every process, also after a test that failed in the middle.

        Ranks have their own sessions, and their pipes would never end.
        """
        for process in self.started:
            if process.poll() is None:
                ranks = descendants(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                send(ranks, signal.SIGKILL)
                process.communicate()

    def _entry(self) -> list[str]:
        """The command line of a pod, or `-m` with the package name so that coverage recognises it."""
        if measured() and self.python == sys.executable and not self.folder:
            return ["-m", "torchrun_runtime.launch"]
        return [str(self.folder or FOLDER)]

    def run(self, command: "str | list[str]", **environment: str) -> Result:
        return self.start(command, **environment).end()

    def _environment(self, log: Path) -> Mapping[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "TMPDIR": str(self.directory),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHRUN_START_FILE": "",
            "TORCHRUN_TERMINATION_LOG": str(log),
            **measured(),
        }


def torchrun_environment(python: str, processes: int = 2, **more: str) -> "dict[str, str]":
    """The variables of the pod of one node, for a python that has torch."""
    port = str(free_port())
    return {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": str(processes),
        "PET_NODE_RANK": "0",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "PET_MAX_RESTARTS": "0",
        **more,
    }


def changed(launcher: Launcher, limits: dict[str, dict[str, str]]) -> Launcher:
    """The launcher with other constants: for each file of it, texts and what replaces them.

    Coverage does not measure it.
    """
    folder = launcher.directory / "launch"
    # Without the compiled files: other tests may be writing them.
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for module, texts in limits.items():
        source = (folder / module).read_text()
        for text, other in texts.items():
            assert source.count(text) == 1, text
            source = source.replace(text, other)
        (folder / module).write_text(source)
    return replace(launcher, folder=folder)


def await_end(pid: int) -> None:
    """Return once no thread of the process runs. A zombie counts: init may reap it late."""
    deadline = time.monotonic() + SECONDS
    while not set(_states(pid)) <= {"Z", "X"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _states(pid: int) -> Iterator[str]:
    """Of its threads."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
                yield stat.rpartition(")")[2].split()[0]


def script(directory: Path, text: str, name: str = "script.py") -> str:
    """Write a program into the directory; returns its name."""
    (directory / name).write_text(textwrap.dedent(text))
    return name


def launcher_with_training(python: str, directory: Path, text: str) -> Iterator[Launcher]:
    """A launcher for the program `text` as train.py. Ends what it has started: for a fixture."""
    script(directory, text, "train.py")
    launcher = Launcher(python, directory)
    yield launcher
    launcher.clear()
