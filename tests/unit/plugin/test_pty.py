"""The program in a real terminal: widths, colours, and Ctrl-C in each state."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from .api_server import refusal
from .laptop import Laptop, play_controller
from .logs.test_status_view import a_job
from .upload.test_submission import play_repeated_failure

pytestmark = pytest.mark.long  # processes

COLOUR = re.compile(rb"\x1b\[[\d;]*3\dm")
SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")


class Screen:
    """A terminal of a given width that runs the program."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.seen = b""
        self._terminal = terminal
        self._before = termios.tcgetattr(terminal)

    def until(self, words: bytes) -> None:
        """Read until this text is shown."""
        while words not in self.seen:
            assert self._read(), self.seen.decode(errors="replace")

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def ends(self, seconds: float) -> bool:
        """Whether the program ends before the output is silent for this long."""
        while select.select([self._terminal], [], [], seconds)[0]:
            if not self._read():
                return True
        return False

    def end(self) -> int:
        """Read to the end. Returns the exit code, and checks that the terminal is restored."""
        while self._read():
            pass
        code = self.process.wait(60)
        assert self.seen.count(b"\x1b[?25l") == self.seen.count(b"\x1b[?25h"), (
            "the cursor is hidden"
        )
        assert termios.tcgetattr(self._terminal) == self._before
        return code

    def text(self) -> str:
        return SEQUENCE.sub(b"", self.seen).decode()

    def _read(self) -> bytes:
        try:
            part = os.read(self._terminal, 4096)
        except OSError:  # the program has closed its end
            part = b""
        self.seen += part
        return part


def take(terminal: int) -> None:
    """Make it the controlling terminal, so that Ctrl-C sends SIGINT."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(
    laptop: Laptop,
    *words: str,
    width: int = 80,
    environment: dict[str, str] | None = None,
    program: tuple[str, str] = ("-m", "kubectl_torchrun"),
) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    command = [sys.executable, *program, words[0]]
    given = {name: value for name, value in os.environ.items()
             if name not in ("NO_COLOR", "COLUMNS", "LINES")}  # fmt: skip
    with subprocess.Popen(
        [*command, f"--kubeconfig={laptop.kubeconfig}", "-n", "ns", *words[1:]],
        env={**given, "TERM": "xterm-256color", **(environment or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: take(theirs),
    ) as process:
        os.close(theirs)
        try:
            yield Screen(process, ours)
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("words", [["list"], ["queues"], ["status", "run", "--no-watch"]])
def test_no_line_is_wider_than_the_screen(laptop: Laptop, words: list[str], width: int) -> None:
    a_job(laptop)
    with terminal(laptop, *words, width=width) as screen:
        assert screen.end() == 0
    lines = screen.text().splitlines()
    assert lines
    assert max(map(len, lines)) <= width
    assert any("run" in line or "q" in line for line in lines)


def test_the_live_view_redraws_and_ends_with_the_run(laptop: Laptop) -> None:
    a_job(laptop)
    with terminal(laptop, "status", "run") as screen:
        screen.until(b"1/2 ready")
        laptop.job("run", status={"phase": "Succeeded", "reason": "Completed"})
        screen.until(b"Succeeded")
        assert screen.end() == 0
    assert COLOUR.search(screen.seen)


def test_an_error_after_the_end_of_a_run_does_not_change_its_result(laptop: Laptop) -> None:
    a_job(laptop)

    def fail(request: web.Request) -> web.Response | None:
        ended = "Succeeded" in str(laptop.server.objects["torchrunjobs", "run"])
        lists_pods = request.path.endswith("/pods") and not request.query.get("watch")
        return refusal(403, "the token has expired") if ended and lists_pods else None

    laptop.server.hooks.append(fail)
    with terminal(laptop, "status", "run") as screen:
        screen.until(b"run-r1-0")  # the pods have been listed
        laptop.job("run", status={"phase": "Succeeded", "reason": "Completed"})
        assert screen.end() == 0
    assert "Succeeded" in screen.text()


def test_the_live_view_shows_an_edit_that_broke_the_run(laptop: Laptop) -> None:
    spec = {"jobQueue": "q", "numNodes": 1, "development": True}
    laptop.job("run", spec=spec, status={"phase": "Running"})
    waits = "torchrun-launch: waiting for the next edit: kubectl torchrun sync (10 s)\n"
    pod = laptop.worker("run", 0, 0, "step 1\n")
    with terminal(laptop, "status", "run") as screen:
        screen.until(pod.encode())
        laptop.server.logs[pod].append(waits)
        screen.until(b"node 0: the command failed")
        screen.press(b"\x03")
        assert screen.end() == 130


def test_no_color_is_honoured(laptop: Laptop) -> None:
    a_job(laptop)
    laptop.server.logs["run-r1-0"] = ["2026-01-01T00:00:00.000000000Z hello\n"]
    for words in (["status", "run", "--no-watch"], ["logs", "run"]):
        with terminal(laptop, *words, environment={"NO_COLOR": "1"}) as screen:
            assert screen.end() == 0
        assert not COLOUR.search(screen.seen), screen.seen


@pytest.mark.parametrize("words", [["list", "-w"], ["queues", "--watch"]])
def test_live_tables(laptop: Laptop, words: list[str]) -> None:
    a_job(laptop)
    with terminal(laptop, *words, width=120) as screen:
        screen.until(b"AGE")
        if words[0] == "list":
            laptop.job("other", status={"phase": "Queued"})
            screen.until(b"other")
            laptop.server.delete("torchrunjobs", "other")
        else:
            laptop.server.put("torchrunqueues", "second")
            screen.until(b"second")
        screen.press(b"\x03")
        assert screen.end() == 130


@pytest.mark.parametrize(
    ("kind", "words"), [("torchrunjobs", "list"), ("torchrunqueues", "queues")]
)
def test_a_followed_table_without_a_terminal_has_a_line_for_each_change(
    laptop: Laptop, kind: str, words: str
) -> None:
    laptop.job("old", status={"phase": "Running"})
    command = [sys.executable, "-m", "kubectl_torchrun", words, "--watch"]
    with subprocess.Popen(
        [*command, f"--kubeconfig={laptop.kubeconfig}", "-n", "ns"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            head, first = process.stdout.readline(), process.stdout.readline()
            assert head.startswith("NAME ")
            assert "AGE" not in head.split()
            assert first.startswith("old " if words == "list" else "q ")
            laptop.server.put(kind, "new")
            assert process.stdout.readline().startswith("new ")
        finally:
            process.kill()


def test_ctrl_c_in_the_live_view(laptop: Laptop) -> None:
    a_job(laptop)
    with terminal(laptop, "status", "run") as screen:
        screen.until(b"1/2 ready")
        screen.press(b"\x03")
        assert screen.end() == 130
    assert "The job continues. kubectl torchrun status run -n ns" in " ".join(screen.text().split())


PATIENT = """
from kubectl_torchrun.__main__ import main
from kubectl_torchrun.upload import submission
submission.ASK_SECONDS = 60.0
main()
"""


def test_ctrl_c_before_the_upload_and_the_second_one(laptop: Laptop) -> None:
    with terminal(laptop, "run", "--name", "run", "x", program=("-c", PATIENT)) as screen:
        screen.until(b"Created")
        screen.press(b"\x03")
        screen.until(b"within 60 s")
        screen.press(b"\x03")
        assert screen.end() == 130
    assert "Deleted torchrunjob.torchrun.ai/run" in screen.text()
    assert ("torchrunjobs", "run") not in laptop.server.objects


def test_ctrl_c_while_waiting(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    with terminal(laptop, "suspend", "run", "--wait") as screen:
        screen.until(b"Suspending job run")
        screen.press(b"\x03")
        assert screen.end() == 130
    assert "Stopped; the controller still makes the requested change" in screen.text()


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 130), (b"\x03", 130)])
def test_a_question_before_a_job_is_deleted(laptop: Laptop, answer: bytes, code: int) -> None:
    laptop.job("run")
    with terminal(laptop, "cancel", "run") as screen:
        screen.until(b"[y/N]")
        screen.press(answer)
        while answer == b"\x03" and not screen.ends(30):
            screen.press(answer)  # it arrived between two signal checks of Python
        assert screen.end() == code
    assert (("torchrunjobs", "run") in laptop.server.objects) == (code != 0)
    assert ("Nothing was deleted." in screen.text()) == (code != 0)


def test_following_in_a_terminal(laptop: Laptop) -> None:
    play_controller(laptop.server)
    with terminal(laptop, "run", "--name", "run", "x", width=60) as screen:
        assert screen.end() == 0
    assert "[1]\x1b[0m step 2" in screen.seen.decode()


def test_a_repeated_failure_stops_a_run_in_a_terminal(laptop: Laptop) -> None:
    play_repeated_failure(laptop)
    laptop.server.hooks.pop()
    with terminal(laptop, "run", "--name", "run", "x") as screen:
        assert screen.end() == 6
    assert "Suspended job run." in screen.text()


@pytest.mark.parametrize("words", [("logs", "run"), ("status", "run", "--no-watch")])
def test_colors_can_be_turned_off_in_a_terminal(laptop: Laptop, words: tuple[str, ...]) -> None:
    put_failed_job(laptop)
    with terminal(laptop, *words) as screen:
        assert screen.end() == 0
    assert COLOUR.search(screen.seen)
    with terminal(laptop, *words, "--color", "never") as screen:
        assert screen.end() == 0
    assert not COLOUR.search(screen.seen)


@pytest.mark.parametrize("words", [("logs", "run"), ("status", "run", "--no-watch")])
def test_colors_can_be_turned_on_without_a_terminal(laptop: Laptop, words: tuple[str, ...]) -> None:
    put_failed_job(laptop)
    assert not COLOUR.search(laptop.run(*words).stdout_bytes)
    assert COLOUR.search(laptop.run(*words, "--color=always").stdout_bytes)


def put_failed_job(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Failed"})
    laptop.worker("run", 0, 0, "2026-01-01T00:00:00.000000000Z step 1\n", terminated={})
