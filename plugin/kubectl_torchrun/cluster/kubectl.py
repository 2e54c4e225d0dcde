"""kubectl as the way to the API server: its proxy on a socket of our own.

Every way to log in that kubectl knows works, and no credential passes through this program.
"""

import os
import re
import select
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.text import echo

_START_SECONDS = 15.0
_SERVING = re.compile(rb"Starting to serve on (.+)\n")
_LOG_LINE = re.compile(r"[IWEF]\d{4} ")
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# The shell creates the directory and removes it. When this program's end of the pipe closes, even
# because it was killed, the shell ends the proxy and everything that the proxy has started. It
# removes the directory after the proxy, which could put a socket into it. The process group is the
# shell's own.
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
    """The flags that say which cluster and namespace are meant, as kubectl takes them."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def flags(self, *, namespace: bool = True) -> list[str]:
        """Those that were given."""
        given = {"kubeconfig": self.kubeconfig, "context": self.context}
        if namespace:
            given["namespace"] = self.namespace
        return [f"--{name}={value}" for name, value in given.items() if value]


@contextmanager
def proxy(target: Target) -> Iterator[Path]:
    """A running `kubectl proxy`: the path of its unix socket, in a private directory.

    Raises ClusterProblem with kubectl's error if it does not start.
    """
    command = [find_kubectl(), *target.flags(namespace=False)]
    with subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for this program, which still needs the proxy then
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stderr = _StderrLog(process.stderr)
        try:
            socket = _SERVING.search(_first_output(process.stdout))
            if socket is None:
                raise ClusterProblem(f"kubectl proxy does not start: {stderr.after_end()}")
            yield Path(os.fsdecode(socket[1]))
        finally:
            process.stdin.close()


class ClusterNamespace(NamedTuple):
    """A namespace and the address of its API server; the address is empty where unknown."""

    server: str
    name: str


def resolve(target: Target) -> ClusterNamespace:
    """What the flags and the current context mean. Raises ClusterProblem.

    The namespace is the flag's, else the context's, else kubectl's default.
    """
    form = '{.clusters[0].cluster.server}{"\\n"}{..namespace}'
    command = [find_kubectl(), "config", "view", "--minify", f"--output=jsonpath={form}"]
    try:
        result = subprocess.run(
            [*command, *target.flags()], capture_output=True, text=True, timeout=_START_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterProblem("kubectl config view does not answer.") from None
    if result.returncode == 0:
        server, _, current = result.stdout.partition("\n")
        return ClusterNamespace(server.strip(), target.namespace or current.strip() or "default")
    if target.namespace:  # kubectl itself says more where it is needed
        return ClusterNamespace("", target.namespace)
    if target.context or target.kubeconfig or not _SERVICE_ACCOUNT_NAMESPACE.exists():
        raise ClusterProblem(
            f"kubectl knows no cluster: {result.stderr.strip()}\n"
            "Choose one with --kubeconfig or --context; see: kubectl config get-contexts"
        )
    return ClusterNamespace("", _SERVICE_ACCOUNT_NAMESPACE.read_text().strip())


def namespace(target: Target) -> str:
    """The namespace that is meant. Raises ClusterProblem."""
    return target.namespace or resolve(target).name


def find_kubectl() -> str:
    """The path of kubectl. Raises ClusterProblem where there is none."""
    path = shutil.which("kubectl")
    if path is None:
        raise ClusterProblem(
            "kubectl is not on PATH, and this plugin reaches the cluster through it."
            " Install it: https://kubernetes.io/docs/tasks/tools/"
        )
    return path


def _first_output(stdout: IO[bytes]) -> bytes:
    """kubectl prints one line with its socket once it listens, and ends without if it cannot."""
    ready, _, _ = select.select([stdout], [], [], _START_SECONDS)
    return os.read(stdout.fileno(), 4096) if ready else b""


class _StderrLog:
    """kubectl's stderr: its log lines are kept for our messages, the rest is printed at once.

    Login helpers ask there to open a page or to enter a code, while the first request waits.
    """

    def __init__(self, stderr: IO[bytes]) -> None:
        self._kept: deque[str] = deque(maxlen=20)
        # The thread's own: what Popen closes is closed at once, in the middle of a read too.
        self._stderr = open(os.dup(stderr.fileno()), "rb")  # noqa: SIM115
        self._thread = threading.Thread(target=self._read, name="kubectl-stderr", daemon=True)
        self._thread.start()

    def after_end(self) -> str:
        """All of it, once kubectl has ended."""
        self._thread.join(timeout=1)
        return " ".join(self._kept) or "it says nothing"

    def _read(self) -> None:
        with self._stderr:
            for line in self._stderr:
                text = line.decode(errors="replace").rstrip()
                self._kept.append(text)
                if not _LOG_LINE.match(text) and not text.lower().startswith("error:"):
                    echo(text, file=sys.stderr)
