"""Access to the API server through `kubectl proxy` on a private unix socket.

Every authentication method of kubectl works, and no credential passes through this program.
"""

import os
import re
import select
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.text import echo

_START_SECONDS = 15.0
_LONGEST_ERROR = 1 << 14  # bytes of a line of stderr
_SERVING = re.compile(rb"Starting to serve on (.+)\n")
_LOG_LINE = re.compile(r"[IWEF]\d{4} ")
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# The shell creates and removes the directory. When this program's end of the pipe closes, even
# because it was killed, the shell kills the proxy and all processes of its own process group. It
# removes the directory after the proxy has exited, which could still create the socket in it.
_GUARD = """
dir=$(mktemp -d "${TMPDIR:-/tmp}/kubectl-torchrun-XXXXXX") || exit 1
kubectl=$1; shift
"$kubectl" proxy "--unix-socket=$dir/s" "$@" </dev/null &
exec >&- 2>&-
read -r _
kill -KILL $!
wait
rm -rf "$dir"
trap '' TERM
kill -TERM 0
"""


class Target(NamedTuple):
    """The kubectl flags that select cluster and namespace; empty for defaults."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def flags(self, *, namespace: bool = True) -> list[str]:
        """The flags that are set."""
        values = {"kubeconfig": self.kubeconfig, "context": self.context}
        if namespace:
            values["namespace"] = self.namespace
        return [f"--{name}={value}" for name, value in values.items() if value]


@contextmanager
def proxy(target: Target) -> Iterator[Path]:
    """A running `kubectl proxy`: the path of its unix socket, in a private directory.

    Raises ClusterProblem with kubectl's error if it does not start.
    """
    with starting_proxy(target) as wait_for_socket:
        yield wait_for_socket()


@contextmanager
def starting_proxy(target: Target) -> Iterator[Callable[[], Path]]:
    """As `proxy`, but the path is that of a call, which waits until the proxy has started.

    The start takes as long as any other start of kubectl, so both can run at the same time.
    """
    command = [find_kubectl(), *target.flags(namespace=False)]
    with subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C must reach only this program, which still needs the proxy
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stderr = LastLines(process.stderr, _print_prompt)
        stdout = process.stdout

        def wait_for_socket() -> Path:
            socket = _SERVING.search(_first_output(stdout))
            if socket is None:
                why = " ".join(stderr.after_end()) or "no error message"
                raise ClusterProblem(f"kubectl proxy failed to start: {why}")
            return Path(os.fsdecode(socket[1]))

        try:
            yield wait_for_socket
        finally:
            process.stdin.close()
            process.wait()  # after Ctrl-C, Popen would wait for 0.25 s only


class ClusterNamespace(NamedTuple):
    """A namespace and the address of its API server; the address is empty where unknown."""

    server: str
    name: str


def resolve(target: Target) -> ClusterNamespace:
    """The namespace that the flags and the current context select. Raises ClusterProblem.

    The namespace is the flag's, else the context's, else kubectl's default.
    """
    form = '{.clusters[0].cluster.server}{"\\n"}{..namespace}'
    command = [find_kubectl(), "config", "view", "--minify", f"--output=jsonpath={form}"]
    try:
        result = subprocess.run(
            [*command, *target.flags()], capture_output=True, text=True, timeout=_START_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterProblem("kubectl config view timed out.") from None
    if result.returncode == 0:
        server, _, current = result.stdout.partition("\n")
        return ClusterNamespace(server.strip(), target.namespace or current.strip() or "default")
    if target.namespace:  # `kubectl proxy` reports the error, if a cluster is needed
        return ClusterNamespace("", target.namespace)
    if target.context or target.kubeconfig or not _SERVICE_ACCOUNT_NAMESPACE.exists():
        raise ClusterProblem(
            f"kubectl has no cluster configured: {result.stderr.strip()}\n"
            "Select one with --kubeconfig or --context. See: kubectl config get-contexts"
        )
    return ClusterNamespace("", _SERVICE_ACCOUNT_NAMESPACE.read_text().strip())


def namespace(target: Target) -> str:
    """The selected namespace. Raises ClusterProblem."""
    return target.namespace or resolve(target).name


def find_kubectl() -> str:
    """The path of kubectl. Raises ClusterProblem if it is not installed."""
    path = shutil.which("kubectl")
    if path is None:
        raise ClusterProblem(
            "kubectl is not on PATH. Install it: https://kubernetes.io/docs/tasks/tools/"
        )
    return path


def _first_output(stdout: IO[bytes]) -> bytes:
    """The line with the socket, printed once kubectl listens; empty if it exits or times out."""
    ready, _, _ = select.select([stdout], [], [], _START_SECONDS)
    return os.read(stdout.fileno(), 4096) if ready else b""


class LastLines:
    """The last lines of a pipe. A thread reads all of it, so that its program never waits.

    show: is called with each line.
    """

    def __init__(self, pipe: IO[bytes], show: Callable[[str], None] = lambda _: None) -> None:
        self._lines: deque[str] = deque(maxlen=20)
        self._show = show
        # A duplicate, because Popen may close the original during a read of the thread.
        self._pipe = open(os.dup(pipe.fileno()), "rb")  # noqa: SIM115
        self._thread = threading.Thread(target=self._read, name="kubectl-stderr", daemon=True)
        self._thread.start()

    def after_end(self) -> list[str]:
        """The last lines that are not empty, after the program has exited."""
        self._thread.join(timeout=1)
        return [line for line in self._lines if line]

    def _read(self) -> None:
        with self._pipe:
            for line in bounded_lines(self._pipe, _LONGEST_ERROR):
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                self._show(text)


def bounded_lines(pipe: IO[bytes], longest: int = 1 << 20) -> Iterator[bytes]:
    """The lines of a pipe without their newlines. Of a line of more bytes, only the start."""
    starts = True
    while part := pipe.readline(longest):
        if starts:
            yield part.removesuffix(b"\n")
        starts = part.endswith(b"\n")


def _print_prompt(line: str) -> None:
    """Print all but log lines of kubectl.

    Login helpers use stderr to ask for a page to open or a code to enter during the first request.
    """
    if not _LOG_LINE.match(line) and not line.lower().startswith("error:"):
        echo(line, file=sys.stderr)
