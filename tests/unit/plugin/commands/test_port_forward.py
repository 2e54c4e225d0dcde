"""`port-forward`: its arguments, and TensorBoard in a pod.

Commands in the pod run on this machine, and a web server plays kubectl port-forward.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.terminal import Display
from ports import free_port

from ..laptop import Laptop

SHIM = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    --address=localhost) address=127.0.0.1;;
    --address=*) address=${{word#*=}};;
    exec) while [ "$1" != -- ]; do shift; done; shift; exec "$@";;
    *:{port}) exec python3 -m http.server {port} --bind "$address";;
  esac
done
exec {kubectl} "$@"
"""
FORWARD = """
from kubectl_torchrun.cluster.exec_forward import Worker
from kubectl_torchrun.commands import port_forward
from kubectl_torchrun.terminal import Display
{before}
with port_forward._ctrl_c() as check:
    worker = Worker(["-n", "ns"], "pod", 0)
    port_forward._tensorboard(worker, "/runs", "{port}", "localhost", Display(), check)
"""
# The worst instant for Ctrl-C: poll() has acquired its lock.
CTRL_C_IN_POLL = """
import signal, subprocess
class Process(subprocess.Popen):
    def poll(self):
        self._waitpid_lock.acquire()
        signal.raise_signal(signal.SIGINT)
        self._waitpid_lock.release()
        return super().poll()
port_forward.subprocess.Popen = Process
"""
BOARD = """#!/bin/sh
yes warning | head -n 100000 >&2
while [ ! -e {flag} ]; do sleep 0.05; done
echo "no such directory" >&2
echo "command terminated with exit code 3" >&2
exit 3
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("address", "shown"), [("localhost", "localhost"), ("127.0.0.2", "127.0.0.2")]
)
def test_the_end_of_tensorboard_is_reported_with_its_last_line(
    laptop: Laptop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, shown: str
) -> None:
    laptop.job("run", status={"phase": "Running"})
    pod = laptop.worker("run", 0)
    port, flag, programs = free_port(), tmp_path / "flag", tmp_path / "bin"
    programs.mkdir()
    shim = SHIM.format(port=port, kubectl=shutil.which("kubectl"))
    for name, text in (("kubectl", shim), ("tensorboard", BOARD.format(flag=flag))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    notes: list[str] = []

    def note(_: Display, text: str) -> None:
        notes.append(text)
        flag.touch()

    monkeypatch.setattr(Display, "note", note)
    words = ["--tensorboard", "/runs", "--address", address, str(port)]
    result = laptop.run("port-forward", "run", *words)
    assert result.exit_code == 4
    assert result.stderr == f"Error: TensorBoard in pod {pod} has ended: no such directory\n"
    assert [f"http://{shown}:{port}/" in text for text in notes] == [True]


def forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> list[str]:
    """A command that forwards a TensorBoard. The file `pids` then has its programs."""
    port, pids = free_port(), tmp_path / "pids"
    shim = tmp_path / "kubectl"
    shim.write_text(f"#!/bin/sh\necho $$ >>{pids}\n" + SHIM.format(port=port, kubectl="false"))
    board = tmp_path / "tensorboard"
    board.write_text(f"#!/bin/sh\necho $$ >>{pids}\nexec sleep 1000\n")
    for program in (shim, board):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return [sys.executable, "-c", FORWARD.format(port=port, before=before)]


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_program_outlives_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """The port could not be used again."""
    pids = tmp_path / "pids"
    words = forward(tmp_path, monkeypatch)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        assert "Press Ctrl-C to stop" in command.stderr.readline()
        command.send_signal(sent)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) > 2
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.long
def test_ctrl_c_ends_the_command_at_any_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = forward(tmp_path, monkeypatch, CTRL_C_IN_POLL)
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=True, timeout=300)
    # A busy machine may get the response of TensorBoard, and print its address, before the check.
    serves = r"(TensorBoard serves .* Press Ctrl-C to stop\.\n)?"
    assert re.fullmatch(serves + r"Stopped TensorBoard\. The job continues\.\n", done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("started", ["_forward(['false'])", "start_board()"])
def test_programs_that_ended_leave_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    """The command, or the program of the pod, may be the first process of a container."""
    board = tmp_path / "tensorboard"
    board.write_text("#!/bin/sh\nexit 1\n")
    board.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = f"""
import ctypes, os, subprocess
from kubectl_torchrun.commands.port_forward import _TENSORBOARD, _forward
def start_board():
    return subprocess.Popen(["sh", "-c", _TENSORBOARD, "sh"], stdin=subprocess.PIPE)
assert ctypes.CDLL(None).prctl(36, 1) == 0  # PR_SET_CHILD_SUBREAPER
for _ in range(20):
    program = {started}
    assert program.wait() == 1
    program.stdin.close()
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("none")
"""
    words = [sys.executable, "-c", text]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout == b"none\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["70000"], "Invalid port '70000'"),
        (["80:70000"], "Invalid port '80:70000'"),
        (["99999999999999999999"], "Invalid port"),
        (["--tensorboard", "/runs", ":6006"], "needs a local port"),
        (["--tensorboard", "/runs", "0"], "needs a local port"),
    ],
)
def test_wrong_ports_are_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["port-forward", "run", *words])
    assert result.exit_code == 2
    assert message in result.stderr
