"""A process is identified by the mark in its environment, not by its pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_cluster import ClusterError, processes


@pytest.fixture(params=["a Python that knows pidfds", "a portable one"])
def owner(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    if request.param == "a portable one":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    yield tmp_path
    processes.end(tmp_path)


@pytest.mark.parametrize(
    ("environ", "mark"),
    [
        (b"TORCHRUN_CLUSTER_STATE=/s\0TORCHRUN_CLUSTER_COMPONENT=etcd\0", ("/s", "etcd")),
        (b"A=1\0TORCHRUN_CLUSTER_COMPONENT=etcd\0TORCHRUN_CLUSTER_STATE=/s\0", ("/s", "etcd")),
        (b"TORCHRUN_CLUSTER_STATE=/s\0", None),
        (b"X=TORCHRUN_CLUSTER_STATE=/s\0TORCHRUN_CLUSTER_COMPONENT=etcd\0", None),
        (b"TORCHRUN_CLUSTER_STATE_=/s\0TORCHRUN_CLUSTER_COMPONENT=etcd\0", None),
        (b"\xff\xfe\0", None),
        (b"", None),
    ],
)
def test_only_both_variables_make_a_mark(environ: bytes, mark: tuple[str, str] | None) -> None:
    assert processes.read_mark(environ) == mark


def test_a_recycled_pid_is_not_ours(tmp_path: Path) -> None:
    own = processes.Marked(7, "/state", "etcd")
    environ = tmp_path / "7" / "environ"
    environ.parent.mkdir()
    (tmp_path / "7" / "comm").write_text("etcd\n")
    environ.write_bytes(b"TORCHRUN_CLUSTER_STATE=/state\0TORCHRUN_CLUSTER_COMPONENT=etcd\0")
    assert processes.look_at(7, tmp_path) == own
    environ.write_bytes(b"HOME=/\0")
    assert processes.look_at(7, tmp_path) is None


def test_a_shim_does_not_belong_to_its_containerd(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    environ = b"TORCHRUN_CLUSTER_STATE=/state\0TORCHRUN_CLUSTER_COMPONENT=containerd\0"
    (folder / "environ").write_bytes(environ)
    for comm, component in (("containerd", "containerd"), ("containerd-shim", "containerd-shim")):
        (folder / "comm").write_text(f"{comm}\n")
        found = processes.look_at(7, tmp_path)
        assert found
        assert found.component == component


def start_sleeper(owner: Path, component: str) -> int:
    program = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
    log = owner / f"{component}.log"
    processes.start(owner, component, program, log)
    # Before its exec, it may be another process that is found.
    while "up" not in processes.tail(log):
        time.sleep(0.01)
    (process,) = processes.of_cluster(owner, component)
    return process.pid


def test_started_processes_are_found_by_cluster_and_component(owner: Path) -> None:
    first, second = start_sleeper(owner, "etcd"), start_sleeper(owner, "kubelet")
    assert {process.pid for process in processes.of_cluster(owner)} == {first, second}
    assert not processes.of_cluster(owner / "other")
    # It is not our child, so it needs no wait().
    with pytest.raises(ChildProcessError):
        os.waitpid(first, os.WNOHANG)


def test_end_stops_one_component_and_its_marked_children(owner: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    sleeper = "import signal; print('up', flush=True); signal.pause()"
    processes.start(owner, "shim", [sys.executable, "-c", child, sleeper], owner / "shim.log")
    start_sleeper(owner, "etcd")
    while "up" not in processes.tail(owner / "shim.log"):
        time.sleep(0.01)
    processes.end(owner, "shim", signal.SIGTERM, timeout=60)
    assert [process.component for process in processes.of_cluster(owner)] == ["etcd"]


def test_end_spares_processes_without_the_mark(owner: Path) -> None:
    start_sleeper(owner, "etcd")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as bystander:
        processes.end(owner)
        assert bystander.poll() is None
        bystander.terminate()


def test_a_process_that_took_over_a_pid_is_not_signalled(owner: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as bystander:
        former = processes.Marked(bystander.pid, str(owner), "etcd")
        processes.end_these([former], signal.SIGKILL, time.monotonic() + 5)
        assert bystander.poll() is None
        bystander.terminate()
        assert bystander.wait() == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed_at_the_deadline(owner: Path) -> None:
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    processes.start(owner, "etcd", [sys.executable, "-c", stubborn], owner / "log")
    while "ready" not in processes.tail(owner / "log"):
        time.sleep(0.01)
    processes.end(owner, "etcd", signal.SIGTERM, timeout=0.2)
    assert not processes.of_cluster(owner)


def test_the_log_has_the_reason_for_a_missing_program(owner: Path) -> None:
    processes.start(owner, "etcd", ["/no/such/program"], owner / "log")
    # setsid writes its line in pieces.
    while not (owner / "log").read_text().endswith("\n"):
        time.sleep(0.01)
    assert "/no/such/program" in processes.tail(owner / "log")


def test_a_failing_entry_command_is_an_error(owner: Path) -> None:
    with pytest.raises(ClusterError, match="cannot start etcd"):
        processes.start(owner, "etcd", ["true"], owner / "log", inside=["false"])


def test_a_component_has_ended_if_it_is_missing_for_the_time_of_an_exec(
    owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "EXEC_SECONDS", 1000.0)
    check = processes.alive_check(owner, ["sleeper"], lambda name: owner / f"{name}.log")
    check()  # looks as if it has not started yet
    start_sleeper(owner, "sleeper")
    check()
    monkeypatch.setattr(processes, "EXEC_SECONDS", 0.3)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        check()
    processes.end(owner)

    def check_until_it_raises() -> None:
        while True:
            check()

    with pytest.raises(ClusterError, match="sleeper ended"):
        check_until_it_raises()


# A command that needs a word from its stdin to clean up after Ctrl-C.
FOREGROUND = """
import subprocess, sys
from torchrun_cluster import processes

class Reporting(subprocess.Popen):
    def wait(self, timeout=None):
        print("waits", flush=True)
        return super().wait(timeout)

subprocess.Popen = Reporting
try:
    processes.run_command([sys.executable, "-c", '''
try:
    print("starts", flush=True)
    input()
except KeyboardInterrupt:
    print("cleans up after", input(), flush=True)
'''])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_command_in_the_foreground_cleans_up_after_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FOREGROUND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        lines = process.stdout.readline
        try:
            assert {lines(), lines()} == {"waits\n", "starts\n"}
            os.killpg(process.pid, signal.SIGINT)
            assert lines() == "waits\n"
            output, _ = process.communicate("Ctrl-C\n")
        finally:
            process.kill()
    assert output == "cleans up after Ctrl-C\ninterrupted\n"


def test_the_exit_code_of_a_command_in_the_foreground() -> None:
    command = ["sh", "-c", "exit $CODE"]
    assert processes.run_command(command, {**os.environ, "CODE": "7"}) == 7
