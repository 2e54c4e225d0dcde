"""exec and port-forward: kubectl's own, into the worker that is meant."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.kubectl import Target, find_kubectl
from kubectl_torchrun.cluster.mirror import attempt_of, end_of, has_started, rank_of
from kubectl_torchrun.cluster.ranks import ranks_of
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.cluster.slices import JOBS
from kubectl_torchrun.commands.logs import workers
from kubectl_torchrun.errors import SUCCEEDED, ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Terminal
from torchrun_api.names import TRAINER_CONTAINER

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")
TENSORBOARD_PORT = 6006
_ANSWER_SECONDS = 60.0
_END_SECONDS = 5.0
_HAS_TENSORBOARD = (
    "command -v tensorboard >/dev/null 2>&1 || python3 -c 'import tensorboard.main' 2>/dev/null"
)
# It ends when this end of stdin closes, however that comes about; and the reader ends with it.
_TENSORBOARD = """
exec 3<&0
if command -v tensorboard >/dev/null 2>&1; then set -- tensorboard "$@"
else set -- python3 -m tensorboard.main "$@"; fi
"$@" </dev/null &
pid=$!
{ read -r _ <&3; kill $pid; } &
wait $pid
code=$?
kill $! 2>/dev/null
exit $code
"""


class Worker(NamedTuple):
    """A running trainer container, and the flags that lead to it."""

    flags: list[str]
    pod: str
    node: int

    def kubectl(self, *words: str) -> list[str]:
        """A kubectl command line in this cluster and namespace."""
        return [find_kubectl(), *self.flags, *words]

    def inside(self, words: Sequence[str], *flags: str) -> list[str]:
        """One that runs the words in the trainer container."""
        return self.kubectl("exec", *flags, self.pod, "-c", TRAINER_CONTAINER, "--", *words)


def find(target: Target, name: str, node: int | None, rank: int | None) -> Worker:
    """The worker that is meant, of the newest gang: node 0 by default. Raises Problem."""
    with session(target) as cluster:
        job = cluster.run(lambda api: api.get(JOBS, name))

        async def look(api: Api) -> tuple[int, list[tuple[int, str]]]:
            pods = await workers(api, job)
            newest = max(map(attempt_of, pods), default=0)
            wanted = node or 0
            if rank is not None:
                wanted = (await ranks_of(api, job)).node_of(rank)
            return wanted, [
                (rank_of(pod), pod.metadata.name)
                for pod in pods
                if attempt_of(pod) == newest
                and has_started(pod, TRAINER_CONTAINER)
                and end_of(pod, TRAINER_CONTAINER) is None
            ]

        wanted, running = cluster.run(look)
        flags = ["-n", cluster.namespace, *target.flags(namespace=False)]
        for index, pod in running:
            if index == wanted:
                return Worker(flags, pod, index)
        status = job.status
        there = ", ".join(str(index) for index, _ in sorted(running))
        raise UsageProblem(
            f"Node {wanted} of {name} does not run"
            + (f"; nodes {there} do." if running else f": the job is {status.phase or 'new'}.")
            + (f" {status.reason}: {status.message}" if status.reason else "")
        )


def execute(
    target: Target,
    name: str,
    node: int | None,
    rank: int | None,
    command: Sequence[str],
    flags: Sequence[str],
) -> int:
    """Become `kubectl exec`, whose exit code is the command's. Does not return."""
    _become(find(target, name, node, rank).inside(command or SHELL, *flags))
    return SUCCEEDED


def forward(target: Target, name: str, node: int, ports: Sequence[str], address: str) -> int:
    """Become `kubectl port-forward`. Does not return."""
    worker = find(target, name, node, None)
    _become(worker.kubectl("port-forward", f"--address={address}", f"pod/{worker.pod}", *ports))
    return SUCCEEDED


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606  # an argument list, no shell


def tensorboard(
    target: Target,
    name: str,
    node: int,
    directory: str,
    port: str,
    address: str,
    terminal: Terminal,
) -> int:
    """Run TensorBoard in the pod until Ctrl-C, and forward it; the exit code. Raises Problem."""
    worker = find(target, name, node, None)
    local, _, remote = port.partition(":")
    remote = remote or local
    _check_port(local)
    _check_tensorboard(worker)
    words = ["sh", "-c", _TENSORBOARD, "sh", f"--logdir={directory}", f"--port={remote}",
             "--host=127.0.0.1"]  # fmt: skip
    served = subprocess.Popen(
        worker.inside(words, "-i"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for this program, which ends TensorBoard in the pod then
    )
    command = worker.kubectl(
        "port-forward", f"--address={address}", f"pod/{worker.pod}", f"{local}:{remote}"
    )
    forwards = [_forward(command)]
    try:
        _until_it_answers(served, forwards, command, local)
        at = f"http://localhost:{local}/"
        terminal.note(f"TensorBoard of {directory} in {worker.pod}: {at} (Ctrl-C ends it)")
        while served.poll() is None and forwards[-1].poll() is None:
            time.sleep(0.2)
        raise ClusterProblem(f"The connection to {worker.pod} ended; is its pod still there?")
    except KeyboardInterrupt:
        terminal.interrupted()
        terminal.note("TensorBoard is ended; the job goes on.")
        return SUCCEEDED
    finally:
        assert served.stdin is not None
        served.stdin.close()
        for process in forwards:
            process.terminate()
        for process in (served, *forwards):
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if served.stderr is not None:
            served.stderr.close()


def _check_tensorboard(worker: Worker) -> None:
    ended = subprocess.run(
        worker.inside(["sh", "-c", _HAS_TENSORBOARD]),
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if ended.returncode == 0:
        return
    if "command terminated" not in ended.stderr and ended.stderr.strip():
        raise ClusterProblem(f"kubectl exec says: {ended.stderr.strip().splitlines()[-1]}")
    install = " ".join(worker.inside(["pip", "install", "tensorboard"])[1:])
    raise UsageProblem(
        "The job's image has no tensorboard. Add `pip install tensorboard` to the image; for this"
        f" run alone, where pip may write:\n  kubectl {install}"
    )


def _check_port(port: str) -> None:
    import socket

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise UsageProblem(
                f"The local port {port} cannot be used ({error.strerror}): give another, as"
                f" {int(port) + 1}:{TENSORBOARD_PORT}."
            ) from error


def _forward(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # it complains while nobody listens in the pod yet, and ends
        process_group=0,
    )


def _until_it_answers(
    served: subprocess.Popen[bytes],
    forwards: list[subprocess.Popen[bytes]],
    command: list[str],
    port: str,
) -> None:
    """Wait for an answer of TensorBoard; a port-forward that has ended gets a successor."""
    import http.client

    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until:
        if served.poll() is not None:
            assert served.stderr is not None
            said = served.stderr.read().decode(errors="replace").strip().splitlines()
            raise ClusterProblem(f"tensorboard ended in the pod: {said[-1] if said else ''}")
        if forwards[-1].poll() is not None:
            forwards.append(_forward(command))
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=2)
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
        finally:
            connection.close()
    raise ClusterProblem(f"tensorboard does not answer within {_ANSWER_SECONDS:.0f} s.")
