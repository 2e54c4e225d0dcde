"""Programs that the client runs: their output has limits, and none outlives its use."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_sdk.cluster import kubectl
from torchrun_sdk.cluster.kubectl import Child, run_attached

from ..call.test_gang import until
from ..pods import SECONDS


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_output_of_a_command_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "_LONGEST_OUTPUT", 1000)
    assert len(kubectl._run(program("print('x' * 999)"), None)) == 1000
    with pytest.raises(kt.ClusterError, match="more than 1000 characters"):
        kubectl._run(program("while True: print('x' * 10000)"), None)


def test_a_command_may_end_without_reading_its_input() -> None:
    assert kubectl._run(program("print('done')"), "x" * (1 << 20)) == "done\n"
    assert kubectl._run(program("print(len(input()))"), "x" * (1 << 20)) == f"{1 << 20}\n"


def test_the_error_of_a_command_is_its_end() -> None:
    text = "import sys; [print(n, file=sys.stderr) for n in range(100_000)]; sys.exit(1)"
    with pytest.raises(kt.ClusterError, match=r"99998\n99999$") as failed:
        kubectl._run(program(text), None)
    assert str(failed.value).count("\n") < 200


def test_a_long_line_of_a_child_is_passed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl, "LONGEST_LINE", 10)
    lines: list[str] = []
    child = Child(program("print('x' * 25); print('end', end='')"), lines.append, whole=True)
    assert child.wait(SECONDS)
    child.close()
    assert lines == ["x" * 10, "x" * 10, "x" * 5]


def test_the_errors_of_a_child_are_limited() -> None:
    text = "import sys; [print(n, file=sys.stderr) for n in range(100_000)]; print('done')"
    child = Child(program(text), lambda line: None)
    assert child.wait(SECONDS)
    assert child.stderr_tail() == "99995\n99996\n99997\n99998\n99999"
    child.close()
    assert len(child._errors._lines) <= 100


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_child_ends_with_the_client(sent: signal.Signals) -> None:
    """It prints nothing meanwhile, as a watch without changes."""
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    client = (
        "import sys, threading; from torchrun_sdk.cluster.kubectl import Child\n"
        f"child = Child([sys.executable, '-c', {text!r}], lambda line: print(line, flush=True))\n"
        "threading.Event().wait()"
    )
    with subprocess.Popen(program(client), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(sent)
    until(lambda: has_ended(pid))


def test_a_child_has_its_input_and_ends_when_it_is_closed() -> None:
    lines: list[str] = []
    text = "import os, time; print(input() + input(), os.getpid(), flush=True); time.sleep(1000)"
    child = Child(program(text), lines.append)
    child.send("a")
    child.send("b")
    until(lambda: lines)
    child.close()
    text, pid = lines[0].split()
    assert text == "ab"
    assert has_ended(int(pid))


def test_a_child_can_be_closed_after_a_fork() -> None:
    """A process of multiprocessing has a copy of the pipe, and may run for long."""
    child = Child(program("import time; time.sleep(1000)"), lambda line: None)
    copy = os.dup(child._kept.fileno())
    threading.Thread(target=child.close, daemon=True).start()
    until(lambda: child._process.returncode is not None)
    os.close(copy)


@pytest.mark.parametrize(
    "before",
    [
        "",
        # As scripts do whose output goes to `head`.
        "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        "import os; os.close(0)",  # as a daemon, so that a pipe gets the number of stdin
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ],
)
def test_a_client_outlives_its_child(before: str) -> None:
    client = f"""
from torchrun_sdk.cluster.kubectl import Child
{before}
lines = []
child = Child(["/bin/cat"], lines.append)
child.send("a")
child.close_stdin()
code = child.exit_code()
child.wait()
child.close()
print(lines, code)
"""
    with subprocess.Popen(
        program(client), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.communicate(timeout=SECONDS)[0] == "['a'] 0\n"
            assert process.returncode == 0
        finally:
            process.kill()


@pytest.mark.parametrize("words", [["/bin/true"], ["/bin/sleep", "1000"]])
def test_a_child_leaves_no_process_behind(words: list[str]) -> None:
    """The client may be the first process of a container, which inherits orphans."""
    client = f"""
import ctypes, os
from torchrun_sdk.cluster.kubectl import Child
assert ctypes.CDLL(None).prctl(36, 1) == 0  # PR_SET_CHILD_SUBREAPER
for _ in range(20):
    child = Child({words!r}, lambda line: None)
    if {words!r} == ["/bin/true"]:
        child.exit_code()
    child.close()
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("none")
"""
    ended = subprocess.run(program(client), stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout == "none\n"


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or its parent has not asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", 143)])
def test_the_exit_code_of_an_attached_program(end: str, code: int) -> None:
    assert run_attached(program(f"import os, sys; {end}")) == code


def test_an_attached_program_handles_ctrl_c_itself(tmp_path: Path) -> None:
    """It gets the time that it needs, for example to detach from a job."""
    text = """
import signal, sys, time
def interrupted(*_):
    time.sleep(1)
    sys.exit(7)
signal.signal(signal.SIGINT, interrupted)
print("runs", flush=True)
time.sleep(1000)
"""
    (tmp_path / "script.py").write_text(text)
    client = f"""
import subprocess, sys
from torchrun_sdk.cli import main
class Program(subprocess.Popen):
    def wait(self, timeout=None):
        print("waits", flush=True)
        return super().wait(timeout)
subprocess.Popen = Program
sys.exit(main(["run", sys.executable, {str(tmp_path / "script.py")!r}]))
"""
    process = subprocess.Popen(
        program(client),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["runs\n", "waits\n"]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SECONDS) == 7
