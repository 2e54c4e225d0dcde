"""Test runs in forks of one process that has imported the shared libraries, but no code under test."""

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

# Libraries that tests import. None of them imports our code.
_LIBRARIES = (
    *("aiohttp.web", "anyio", "click", "cryptography.x509", "httpx", "hypothesis.strategies"),
    *("kubernetes_asyncio", "msgspec", "prometheus_client", "rich.console", "structlog", "uvloop"),
    "yaml",
)
_OURS = ("torchrun_", "kubectl_torchrun")
_PLUGINS_OFF = ("cacheprovider", "xdist", "pytest_cov", "faulthandler")
ONE_TEST = 60  # seconds
KILLED_BY_TIME = "time"
KILLED_BY_COLLECTION = "collection"


class FirstFailure:
    """A pytest plugin that writes the name of the first failed test to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of each test."""
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)


def preload() -> None:
    """Import the libraries. Raises RuntimeError if they have imported code under test."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith(_OURS)]
    if ours:
        raise RuntimeError(f"forks would share {', '.join(ours)} with each other")


class Run:
    """Pytest on a copy of the code, in a fork."""

    def __init__(
        self, copy: Path, tests: Sequence[str], seconds: float, plugins: Sequence[object] = ()
    ) -> None:
        self._failed = copy / "failed"
        self._failed.unlink(missing_ok=True)
        self._log = copy / "log"
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        (copy / "tests").write_text("".join(f"{test}\n" for test in tests))
        every = [*plugins, FirstFailure(self._failed)]
        self._pid = os.fork()
        if not self._pid:
            try:
                code = run_pytest(copy, self._log, every, stop=not plugins)
            except BaseException:  # a fork never returns into the code of its parent
                self._log.write_text(traceback.format_exc())
                code = 70
            os._exit(code)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def poll(self) -> str | None:
        """The first failure: a test, "collection" or "time"; "" for none. None while it runs."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        if ended:
            return self._verdict(os.waitstatus_to_exitcode(status))
        if time.monotonic() > self._deadline:
            _end(self._pid)
            return KILLED_BY_TIME
        return None

    def wait(self) -> str:
        """Wait for the end, and return the first failure."""
        while (verdict := self.poll()) is None:
            time.sleep(0.02)
        return verdict

    @property
    def log(self) -> str:
        """What pytest printed."""
        return self._log.read_text(errors="replace")

    def _verdict(self, code: int) -> str:
        if code == pytest.ExitCode.OK:
            return ""
        failed = self._failed.read_text() if self._failed.exists() else ""
        return failed or KILLED_BY_COLLECTION


def run_pytest(copy: Path, log: Path, plugins: Sequence[object], *, stop: bool) -> int:
    """Run the tests in the file `tests` of the copy, in a fork. Returns the exit code."""
    os.setsid()
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.path.insert(0, str(copy))
    os.environ |= {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis"),
    }
    os.environ.pop("KUBECONFIG", None)
    sys.dont_write_bytecode = True
    options = ["-q", "--no-header", "--tb=short", f"--timeout={ONE_TEST}", "--hypothesis-seed=0"]
    # Warnings of hypothesis and anyio, pytest plugins that are already imported.
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    options += [word for name in _PLUGINS_OFF for word in ("-p", f"no:{name}")]
    options += [*(["-x"] if stop else []), f"--basetemp={copy / 'tmp'}", f"@{copy / 'tests'}"]
    return int(pytest.main(options, list(plugins)))


def wait(pid: int, seconds: float) -> bool:
    """Wait for a fork. Kills it after the timeout and returns False."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    _end(pid)
    return False


def _end(pid: int) -> None:
    """Kill a run with all its descendants, also those in other sessions."""
    for child in [*_descendants(pid), pid]:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)


def _descendants(pid: int) -> list[int]:
    processes = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            child = int(entry.parent.name)
            processes += [child, *_descendants(child)]
    return processes
