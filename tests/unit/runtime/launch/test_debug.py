"""The debugger of a rank: the helper in the pod, and the rank that answers it."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from torchrun_runtime.launch.debug import find_ranks, is_debugged
from unit.runtime.launching import FOLDER, SECONDS, Launched, Launcher, changed, script

pytestmark = pytest.mark.long  # processes

LOOP = """
    import os, sys, time
    def step(number):
        time.sleep(0.05)
        return number + 1
    number = 0
    print(os.environ["TORCHRUN_LAUNCH_REPORTS"], flush=True)
    while not os.path.exists("stop"):
        number = step(number)
    print("trained, traced by", sys.gettrace(), flush=True)
"""
NO_DEBUGPY = "import sys; sys.modules['debugpy'] = None\n"


class Helper:
    """A helper, and what it has written so far."""

    def __init__(
        self, job: str, debugger: str = "pdb", rank: int = 0, folder: Path = FOLDER
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(folder), "debug", str(rank), debugger, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.messages: list[dict[str, object]] = []
        self.is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._changed:
                self.messages.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.kill()
        self.process.wait()
        self._thread.join(SECONDS)
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def text(self) -> str:
        data = (str(message.get("data", "")) for message in [*self.messages])
        return b"".join(map(base64.b64decode, data)).decode()

    def until(self, found: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: found() or self.is_over, SECONDS), self.messages
        assert found(), self.messages

    def prompts(self, count: int) -> None:
        self.until(lambda: self.text.count("(Pdb) ") == count)

    def send_message(self, **message: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def write(self, data: "str | bytes") -> None:
        raw = data.encode() if isinstance(data, str) else data
        self.send_message(data=base64.b64encode(raw).decode())

    def end(self) -> "dict[str, object]":
        self.until(lambda: self.is_over)
        self.process.wait(SECONDS)
        return self.messages[-1]


@pytest.fixture
def helpers() -> Iterator[Callable[..., Helper]]:
    started: list[Helper] = []

    def start(*arguments: object, **options: object) -> Helper:
        started.append(Helper(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for helper in started:
        helper.close()


class Job:
    """A command that runs, and the folder of its reports."""

    def __init__(self, launcher: Launcher, text: str = LOOP, **environment: str) -> None:
        name = script(launcher.directory, text)
        self.name = f"job-{os.getpid()}-{launcher.directory.name}"
        self._directory = launcher.directory
        self.launched: Launched = launcher.start(
            [launcher.python, name],
            TORCHRUN_LAUNCHER="none",
            TORCHRUN_JOB_NAME=self.name,
            **environment,
        )
        self.reports = self.launched.line()

    def end(self) -> None:
        """Let the training end, which nothing traces any more."""
        (self._directory / "stop").touch()
        result = self.launched.end()
        assert (result.exit_code, result.out) == (0, "trained, traced by None\n"), result


@pytest.mark.parametrize("goodbye", ["c\n", "q\n", ""], ids=["continue", "quit", "end of input"])
def test_pdb_stops_a_rank_that_goes_on_afterwards(
    launcher: Launcher, helpers: Callable[..., Helper], goodbye: str
) -> None:
    job = Job(launcher)
    for _ in range(2):
        helper = helpers(job.name)
        helper.prompts(1)
        assert helper.messages[0]["ready"]["rank"] == 0  # type: ignore[index]
        assert is_debugged(job.reports)
        helper.write("p 6 * 7\nb script.py:4\nc\n")
        helper.prompts(4)
        helper.write("n\n!raise ValueError(1)\ncl\n")
        helper.prompts(7)
        assert "42" in helper.text
        assert "script.py(5)step()" in helper.text
        assert "*** ValueError: 1" in helper.text
        helper.write(goodbye) if goodbye else helper.send_message(eof=True)
        assert helper.end() == {"end": "Rank 0 has been detached and goes on."}
        assert not is_debugged(job.reports)
    job.end()


def test_a_rank_whose_debugger_is_killed_goes_on(
    launcher: Launcher, helpers: Callable[..., Helper]
) -> None:
    job = Job(launcher)
    helper = helpers(job.name)
    helper.prompts(1)
    helper.process.kill()
    helper.process.wait()
    assert not is_debugged(job.reports)
    job.end()


def test_a_laptop_that_was_closed_detaches(
    launcher: Launcher, helpers: Callable[..., Helper], tmp_path: Path
) -> None:
    job = Job(launcher)
    patient = changed(launcher, {"debug.py": {"_LOST_SECONDS = 30": "_LOST_SECONDS = 1"}})
    helper = helpers(job.name, folder=patient.folder)
    helper.until(lambda: helper.is_over)
    assert helper.process.wait(SECONDS) == 1
    assert not is_debugged(job.reports)
    job.end()


def test_a_breakpoint_that_is_never_reached_leaves_no_trace(
    launcher: Launcher, helpers: Callable[..., Helper]
) -> None:
    job = Job(launcher)
    helper = helpers(job.name)
    helper.prompts(1)
    helper.write("b script.py:4, number == -1\nc\n")
    helper.prompts(2)
    helper.send_message(eof=True)
    helper.end()
    job.end()


def test_a_second_debugger_is_refused(launcher: Launcher, helpers: Callable[..., Helper]) -> None:
    job = Job(launcher)
    first = helpers(job.name)
    first.prompts(1)
    assert "Someone else debugs rank 0" in str(helpers(job.name).end()["error"])
    first.write("c\n")
    first.end()
    job.end()


def test_a_rank_that_does_not_exist_is_answered_with_those_that_do(
    launcher: Launcher, helpers: Callable[..., Helper]
) -> None:
    job = Job(launcher, RANK="5", LOCAL_RANK="1")
    assert helpers(job.name, rank=3).end() == {"error": "5", "kind": "ranks"}
    job.end()


BLOCKED = """
    import ctypes, os, sys, threading, time
    lock = ctypes.CDLL(None).pthread_mutex_lock
    unlock = ctypes.CDLL(None).pthread_mutex_unlock
    mutex, locked = ctypes.create_string_buffer(64), threading.Event()
    def other():
        lock(mutex)
        locked.set()
        while not os.path.exists("go"):
            time.sleep(0.05)
        unlock(mutex)
    threading.Thread(target=other).start()
    locked.wait()
    print(os.environ["TORCHRUN_LAUNCH_REPORTS"], flush=True)
    def all_reduce():
        lock(mutex)
    all_reduce()
    while not os.path.exists("stop"):
        time.sleep(0.05)
    print("trained, traced by", sys.gettrace(), flush=True)
"""


def test_a_rank_in_c_is_named_until_it_answers(
    launcher: Launcher, helpers: Callable[..., Helper]
) -> None:
    job = Job(launcher, BLOCKED)
    helper = helpers(job.name)
    helper.until(lambda: bool(helper.messages))
    assert "is in a call into C (all_reduce in " in str(helper.messages[0]["note"])
    (launcher.directory / "go").touch()
    helper.prompts(1)
    helper.write("c\n")
    helper.end()
    job.end()


def test_a_missing_debugpy_is_told(launcher: Launcher, helpers: Callable[..., Helper]) -> None:
    job = Job(launcher, NO_DEBUGPY + LOOP.replace("\n    ", "\n"))
    message = helpers(job.name, "debugpy").end()
    assert message["kind"] == "missing"
    assert "debugpy" in str(message["error"])
    job.end()


class Editor:
    """An editor that speaks DAP through a helper."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._first = len(helper.messages)
        self._number = 0
        helper.send_message(open=True)

    def ask(self, command: str, **arguments: object) -> None:
        self._number += 1
        body = json.dumps(
            {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        ).encode()
        self._helper.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def until(self, text: str) -> None:
        def has_come() -> bool:
            later = self._helper.messages[self._first :]
            data = b"".join(base64.b64decode(str(m.get("data", ""))) for m in later)
            return text in data.decode().replace('": ', '":')

        self._helper.until(has_come)

    def stop_at(self, path: Path, line: int) -> None:
        self.ask("initialize", adapterID="debugpy", pathFormat="path")
        self.ask("attach", justMyCode=False)
        self.until('"event":"initialized"')
        self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": line}])
        self.ask("configurationDone")
        self.until('"event":"stopped"')


@contextmanager
def debugpy_of(python: str) -> Iterator[None]:
    found = subprocess.run([python, "-c", "import debugpy"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("this Python has no debugpy")
    yield


def test_editors_debug_one_after_the_other_and_leave_no_trace(
    launcher: Launcher, helpers: Callable[..., Helper], tmp_path: Path
) -> None:
    with debugpy_of(launcher.python):
        job = Job(launcher)
        helper = helpers(job.name, "debugpy")
        helper.until(lambda: any("ready" in message for message in helper.messages))
        Editor(helper)
        helper.send_message(close=True)  # one that only looks whether the port is open
        for _ in range(2):
            editor = Editor(helper)
            editor.stop_at(tmp_path / "script.py", 9)
            helper.send_message(close=True)
        editor = Editor(helper)
        editor.stop_at(tmp_path / "script.py", 9)
        helper.process.kill()  # at a breakpoint
        helper.process.wait()
        job.end()


def test_only_the_rank_reaches_the_port_of_a_session(
    launcher: Launcher, helpers: Callable[..., Helper]
) -> None:
    with debugpy_of(launcher.python):
        job = Job(launcher)
        helper = helpers(job.name, "debugpy")
        helper.until(lambda: any("ready" in message for message in helper.messages))
        (rank,) = find_ranks(job.name).values()
        os.kill(rank.process.pid, signal.SIGSTOP)  # it does not connect meanwhile
        helper.send_message(open=True)
        port = listening(helper.process.pid)
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.settimeout(SECONDS)
            assert other.recv(1) == b"", "closed, without a byte"
        os.kill(rank.process.pid, signal.SIGCONT)
        helper.send_message(close=True)
        helper.process.stdin.close()  # type: ignore[union-attr]
        helper.process.wait(SECONDS)
        job.end()


def listening(pid: int) -> int:
    """The port on which a process listens, once it does."""
    while True:
        folder = Path(f"/proc/{pid}/fd")
        inodes = {os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                return int(fields[1].rpartition(":")[2], 16)
