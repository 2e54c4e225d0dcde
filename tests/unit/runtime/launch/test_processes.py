"""Which processes run, from /proc."""

import os
import subprocess
import time

import pytest

from torchrun_runtime.launch.processes import Process, alive, descendants, programs, signal_name
from unit.runtime.launching import Launcher, await_end, script

pytestmark = pytest.mark.long  # processes

# A zombie by its state, which is that of its first thread. Another thread runs until stdin ends.
ZOMBIE = """
    import ctypes, os, sys, threading
    def goes_on():
        while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
            pass
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
        os._exit(0)
    threading.Thread(target=goes_on).start()
    ctypes.CDLL(None).pthread_exit(None)
"""


def test_signals_are_named_also_those_without_a_name() -> None:
    assert [signal_name(number) for number in (9, 40)] == ["SIGKILL", "signal 40"]


def test_a_process_that_has_just_ended_is_no_shell() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    parent = Process(ended.pid, os.getpid(), "python", 1)
    tree = [parent, Process(os.getpid(), ended.pid, "true", 2)]
    assert programs(tree) == tree


def child(pid: int) -> "Process | None":
    return next((process for process in descendants(os.getpid()) if process.pid == pid), None)


def test_a_process_whose_first_thread_has_ended_still_runs(launcher: Launcher) -> None:
    name = script(launcher.directory, ZOMBIE)
    with subprocess.Popen(
        [launcher.python, launcher.directory / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin
        assert program.stdout
        assert program.stdout.readline() == b"%d\n" % program.pid
        process = child(program.pid)
        assert process is not None
        assert alive(process)
        program.stdin.close()
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(process), "a zombie with no other thread"
        assert child(program.pid) is None


def test_a_process_has_the_time_of_its_start() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        process = child(program.pid)
        assert process is not None
        assert before * ticks - 1 <= process.started <= after * ticks + 1


# Its stdin never ends, because it has the other end itself.
STARTER = """
    import os, subprocess, sys
    end, own = os.pipe()
    zombie = subprocess.Popen(
        [sys.executable, "zombie.py"], stdin=end, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, pass_fds=[own]
    )
    os.write(1, zombie.stdout.readline())
    os._exit(3)
"""


def test_such_a_process_ends_with_the_command(launcher: Launcher) -> None:
    script(launcher.directory, ZOMBIE, "zombie.py")
    starter = script(launcher.directory, STARTER)
    launched = launcher.start([launcher.python, starter], TORCHRUN_LAUNCHER="none")
    pid = int(launched.line())
    assert launched.end().exit_code == 3
    await_end(pid)
