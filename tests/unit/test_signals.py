"""Signals of a normal process and of PID 1, for which the kernel has no default actions."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

AS_PID_1 = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
# Prints each step, and continues after a line of input.
PROGRAM = """
import asyncio, os, signal, sys, threading
from torchrun_controller.signals import Signals

def say(word):
    print(word, os.getpid(), flush=True)

async def main():
    await asyncio.to_thread(sys.stdin.readline)
    waits = asyncio.ensure_future(signals.wait())
    await asyncio.sleep(0)
    say("waits")
    # A signal in a thread does not end the poll of the main thread, and is as one just before it.
    if "in a thread" in sys.argv:
        threading.Thread(target=signal_itself, daemon=True).start()
        say((await waits).name)
        await asyncio.Event().wait()
    say((await waits).name)
    await asyncio.to_thread(sys.stdin.readline)

def signal_itself():
    for line in sys.stdin:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

def loop():
    if "uvloop" in sys.argv:
        import uvloop
        return uvloop.new_event_loop()
    return asyncio.new_event_loop()

signals = Signals().install()
say("starts")
with asyncio.Runner(loop_factory=loop) as runner:
    runner.run(main())
"""


def may_unshare() -> bool:
    try:
        answer = subprocess.run([*AS_PID_1, "true"], capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        return False
    return answer.returncode == 0


class Process:
    def __init__(self, process: "subprocess.Popen[str]", *, is_pid_1: bool) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin: IO[str] = process.stdin
        self.stdout: IO[str] = process.stdout
        self.is_pid_1 = is_pid_1
        self.process = process
        self.expect("starts")
        self.pid = self._child() if is_pid_1 else process.pid

    def _child(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text())

    def expect(self, word: str) -> None:
        printed, pid = self.stdout.readline().split()
        assert printed == word
        assert (pid == "1") == self.is_pid_1

    def go_on(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended_by(self, number: int) -> bool:
        # unshare reports a signal of its child in its exit code only.
        return self.process.wait(60) in (-number, 128 + number)


@contextmanager
def started(mode: str, *options: str) -> Iterator[Process]:
    before = AS_PID_1 if mode == "PID 1" else []
    with subprocess.Popen(
        [*before, sys.executable, "-c", PROGRAM, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Process(process, is_pid_1=bool(before))
        finally:
            process.kill()


modes = pytest.mark.parametrize(
    "mode",
    [
        "ordinary",
        pytest.param(
            "PID 1",
            marks=pytest.mark.skipif(not may_unshare(), reason="needs a PID namespace of its own"),
        ),
    ],
)


@modes
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_handled_and_the_second_ends_the_process(
    mode: str, loop: str, number: signal.Signals
) -> None:
    with started(mode, loop) as process:
        process.go_on()
        process.expect("waits")
        process.send(number)
        process.expect(number.name)
        process.send(number)
        assert process.ended_by(number)


@modes
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_wakes_the_loop_that_polls(mode: str, loop: str) -> None:
    with started(mode, loop, "in a thread") as process:
        process.go_on()
        process.expect("waits")
        process.go_on()
        process.expect("SIGTERM")
        process.go_on()
        assert process.ended_by(signal.SIGTERM)


@modes
def test_the_shutdown_is_not_interrupted(mode: str) -> None:
    with started(mode) as process:
        process.go_on()
        process.expect("waits")
        process.send(signal.SIGTERM)
        process.expect("SIGTERM")
        process.go_on()
        assert process.process.wait(60) == 0


@modes
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_early_signal_is_not_lost(mode: str, loop: str) -> None:
    with started(mode, loop) as process:
        process.send(signal.SIGTERM)
        assert process.ended_by(signal.SIGTERM)
