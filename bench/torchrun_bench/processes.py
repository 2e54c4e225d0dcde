"""The two programs that are compared, each as a process of its own on a namespace of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec

from torchrun_bench.http import Server

CONTROLLER_NAMESPACE, BARE_NAMESPACE = "bench-controller", "bench-bare"
TICKS = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True):
    """CPU seconds since its start, and peak resident memory in MiB."""

    cpu_seconds: float
    peak_mib: float


def usage(pid: int) -> Usage:
    """Read /proc of a process that runs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line
    )
    ticks = int(fields[11]) + int(fields[12])
    return Usage(cpu_seconds=ticks / TICKS, peak_mib=int(peak.split()[1]) / 1024)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def controller(kubeconfig: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The controller as users run it, without leader election."""
    command = [
        sys.executable, "-m", "torchrun_controller",
        "--kubeconfig", str(kubeconfig),
        "--namespaces", CONTROLLER_NAMESPACE,
        "--runtime-image", "bench/none",
        "--leader-election", "false",
        "--listen-address", "127.0.0.1",
        "--listen-port", str(port),
        "--log-level", "warning",
    ]  # fmt: skip
    with running(command) as process:
        yield process


@contextmanager
def bare(server: Server, plan: bytes, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The bare client, ready to write."""
    (folder / "server.json").write_bytes(msgspec.json.encode(server))
    (folder / "plan.json").write_bytes(plan)
    command = [
        sys.executable, "-m", "torchrun_bench.bare",
        str(folder / "server.json"), BARE_NAMESPACE, str(folder / "plan.json"),
    ]  # fmt: skip
    with running(command, subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the bare client did not start")
        yield process


@contextmanager
def running(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block; raises RuntimeError where it ended by itself."""
    bench = str(Path(__file__).resolve().parent.parent)
    process = subprocess.Popen(command, stdout=stdout, env=os.environ | {"PYTHONPATH": bench})
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"{command[:3]} ended with {process.returncode} during the bench")
    finally:
        process.terminate()
        process.wait(timeout=30)


async def ready(port: int, seconds: float = 30) -> None:
    """Wait until the controller says that it is ready."""
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
    raise RuntimeError(f"the controller was not ready after {seconds} s")
