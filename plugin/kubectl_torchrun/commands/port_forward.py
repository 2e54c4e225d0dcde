"""`port-forward`: forward local ports, or a TensorBoard in the pod, to a node."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.options import Command, cluster_options, job_argument, run_command
from kubectl_torchrun.cli.types import Count
from kubectl_torchrun.cluster.kubectl import LastLines, Target
from kubectl_torchrun.errors import SUCCEEDED, ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.exec_forward import Worker

_PORTS = re.compile(r"(?:(\d{0,5}):)?(\d{1,5})")
_HIGHEST_PORT = 65535
TENSORBOARD_PORT = 6006
# Where to connect to, for addresses to listen on.
_LOOPBACK = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_EXEC_END = "command terminated with exit code"  # of kubectl
_ANSWER_SECONDS = 60.0
_END_SECONDS = 5.0
_HAS_TENSORBOARD = (
    "command -v tensorboard >/dev/null 2>&1 || python3 -c 'import tensorboard.main' 2>/dev/null"
)
# TensorBoard stops when stdin closes, even if the plugin was killed; the reader stops with it.
_TENSORBOARD = """
exec 3<&0
if command -v tensorboard >/dev/null 2>&1; then set -- tensorboard "$@"
else set -- python3 -m tensorboard.main "$@"; fi
"$@" </dev/null &
pid=$!
{ read -r _ <&3; kill $pid; } &
wait $pid
code=$?
kill -KILL $! 2>/dev/null
wait
exit $code
"""
# Runs a program that ends when stdin closes, even because the plugin was killed.
_GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- &
program=$!
{ read -r _ <&3; kill -KILL $program; } &
exec 3<&-
wait $program
code=$?
kill -KILL $! 2>/dev/null
wait
exit $code
"""


@click.command("port-forward", cls=Command)
@job_argument
@click.argument("ports", nargs=-1, metavar="[LOCAL:]PORT...")
@click.option("--node", type=Count(0), default=0, help="Node by its index. Default: 0.")
@click.option("--address", default="localhost", show_default=True, help="Address to listen on.")
@click.option(
    "--tensorboard", metavar="DIR", help="Run TensorBoard in the pod for this directory of the pod."
)
@cluster_options
def command(
    job: str,
    ports: tuple[str, ...],
    node: int,
    address: str,
    tensorboard: str | None,
    target: Target,
) -> None:
    """Forward local ports to a node of JOB until Ctrl-C.

    With --tensorboard, the default port is 6006. TensorBoard stops when this command ends.

    \b
    Examples:
      kubectl torchrun port-forward my-project-x7k2p 8000
      kubectl torchrun port-forward my-project-x7k2p --tensorboard /checkpoints/runs
      kubectl torchrun port-forward my-project-x7k2p --tensorboard /app/runs 6007:6006
    """
    for port in ports:
        match = _PORTS.fullmatch(port)
        if match is None or any(int(part or 0) > _HIGHEST_PORT for part in match.groups()):
            raise click.UsageError(
                f"Invalid port {port!r}. Use PORT or LOCAL:PORT, for example 9000:8000."
            )
        if tensorboard is not None and port.startswith((":", "0")):
            raise click.UsageError(f"--tensorboard needs a local port, but {port!r} has none.")
    if tensorboard is None and not ports:
        raise click.UsageError("No port given. Add PORT, LOCAL:PORT or --tensorboard DIR.")
    if tensorboard is not None and len(ports) > 1:
        raise click.UsageError("--tensorboard accepts only one port.")

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.exec_forward import find_worker, replace_process

        worker = find_worker(target, job, node, None)
        if tensorboard is None:
            flag = f"--address={address}"
            replace_process(worker.kubectl("port-forward", flag, f"pod/{worker.pod}", *ports))
        port = ports[0] if ports else str(TENSORBOARD_PORT)
        with _ctrl_c() as check:
            return _tensorboard(worker, tensorboard, port, address, terminal, check)

    run_command(work)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt after Ctrl-C, which raises nothing by itself.

    An exception between two instructions of Popen.poll can keep its lock, and wait() never returns.
    """
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell ignores it for a program in the background
        signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _tensorboard(
    worker: "Worker",
    directory: str,
    port: str,
    address: str,
    terminal: Display,
    check_ctrl_c: Callable[[], None],
) -> int:
    """Run TensorBoard in the pod until Ctrl-C, and forward it; the exit code. Raises Problem."""
    local, _, remote = port.partition(":")
    remote = remote or local
    first = address.partition(",")[0]  # kubectl listens on each of these
    host = _LOOPBACK.get(first, first)
    _check_port(host, local)
    _check_tensorboard(worker)
    words = ["sh", "-c", _TENSORBOARD, "sh", f"--logdir={directory}", f"--port={remote}",
             "--host=127.0.0.1"]  # fmt: skip
    server = subprocess.Popen(
        worker.exec_command(words, "-i"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C must reach only this program, which then stops TensorBoard
    )
    assert server.stderr is not None
    stderr = LastLines(server.stderr)
    command = worker.kubectl(
        "port-forward", f"--address={address}", f"pod/{worker.pod}", f"{local}:{remote}"
    )
    forwards = [_forward(command)]

    def check() -> None:
        check_ctrl_c()
        _check_server(server, stderr, worker)

    try:
        _wait_for_answer(forwards, command, host, local, check)
        name = "localhost" if first in _LOOPBACK else f"[{host}]" if ":" in host else host
        at = f"http://{name}:{local}/"
        terminal.note(
            f"TensorBoard serves {directory} of pod {worker.pod} at {at}. Press Ctrl-C to stop."
        )
        while forwards[-1].poll() is None:
            check()
            time.sleep(0.2)
        check()
        raise ClusterProblem(f"Lost connection to pod {worker.pod}. Check that it still runs.")
    except KeyboardInterrupt:
        terminal.interrupted()
        terminal.note("Stopped TensorBoard. The job continues.")
        return SUCCEEDED
    finally:
        for process in (server, *forwards):
            assert process.stdin is not None
            process.stdin.close()
        for process in (server, *forwards):
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if server.stderr is not None:
            server.stderr.close()


def _check_tensorboard(worker: "Worker") -> None:
    with subprocess.Popen(
        worker.exec_command(["sh", "-c", _HAS_TENSORBOARD]),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        stderr = LastLines(process.stderr)
        if process.wait() == 0:
            return
        lines = stderr.after_end()
    if lines and not any(_EXEC_END in line for line in lines):
        raise ClusterProblem(f"kubectl exec failed: {lines[-1]}")
    install = " ".join(worker.exec_command(["pip", "install", "tensorboard"])[1:])
    raise UsageProblem(
        "The image of the job does not contain TensorBoard. Install it in the image, or for this"
        f" run only:\n  kubectl {install}"
    )


def _check_port(host: str, port: str) -> None:
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
        except OSError as error:
            raise UsageProblem(
                f"Cannot listen on port {port} of {host}: {error.strerror}. Use another port, for"
                f" example {int(port) + 1}:{TENSORBOARD_PORT}."
            ) from error


def _forward(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # it prints errors and exits until TensorBoard listens
        process_group=0,
    )


def _check_server(server: subprocess.Popen[bytes], stderr: LastLines, worker: "Worker") -> None:
    """Raises ClusterProblem with the last line of TensorBoard if it has ended."""
    if server.poll() is None:
        return
    lines = [line for line in stderr.after_end() if not line.startswith(_EXEC_END)]
    why = lines[-1] if lines else "no output"
    raise ClusterProblem(f"TensorBoard in pod {worker.pod} has ended: {why}")


def _wait_for_answer(
    forwards: list[subprocess.Popen[bytes]],
    command: list[str],
    host: str,
    port: str,
    check: Callable[[], None],
) -> None:
    """Wait for a response of TensorBoard; restart a port-forward that has exited.

    check: raises ClusterProblem if TensorBoard has ended, KeyboardInterrupt after Ctrl-C.
    """
    import http.client

    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until:
        check()
        if forwards[-1].poll() is not None:
            forwards.append(_forward(command))
        connection = http.client.HTTPConnection(host, int(port), timeout=2)
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
        finally:
            connection.close()
    raise ClusterProblem(f"TensorBoard did not respond within {_ANSWER_SECONDS:.0f} s.")
