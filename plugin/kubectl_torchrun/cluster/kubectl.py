"""Access to the API server through `kubectl proxy` on a private unix socket.

Every authentication method of kubectl works, and no credential passes through this program.
"""

import json
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
from typing import IO, TYPE_CHECKING, NamedTuple

from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.home import home
from kubectl_torchrun.text import echo

if TYPE_CHECKING:
    from torchrun_api.json import JsonObject

_START_SECONDS = 15.0
_LONGEST_ERROR = 1 << 14  # bytes of a line of stderr
_SERVING = re.compile(rb"Starting to serve on (.+)\n")
_LOADING = re.compile(r'error loading config file "([^"]*)": (.*)', re.DOTALL)
_CONFIG_LISTS = ("contexts", "clusters", "users")
_NO_CONFIG = "couldn't get version/kind"  # of kubectl, before a type of Go
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
        try:
            socket = _SERVING.search(_first_output(process.stdout))
            if socket is None:
                why = " ".join(stderr.after_end()).removeprefix("error: ") or "no error message"
                raise ClusterProblem(f"kubectl proxy failed to start: {why}")
            yield Path(os.fsdecode(socket[1]))
        finally:
            process.stdin.close()
            process.wait()  # after Ctrl-C, Popen would wait for 0.25 s only


class ClusterNamespace(NamedTuple):
    """A namespace and the address of its API server; the address is empty where unknown."""

    server: str
    name: str


class SelectedCluster(NamedTuple):
    """What the flags select.

    pinned: flags with the name of the context. All kubectl commands of one call have them, so that
    a change of the current context does not send the next one to another cluster.
    """

    where: ClusterNamespace
    pinned: Target


def resolve(target: Target) -> SelectedCluster:
    """The cluster and the namespace that the flags and the current context select.

    The namespace is the flag's, else the context's, else kubectl's default. Raises ClusterProblem
    with the file or the name that is wrong.
    """
    from torchrun_api.json import object_at

    config = _read_config(target)
    contexts, clusters, users = (_by_name(config, kind) for kind in _CONFIG_LISTS)
    name = target.context or str(config.get("current-context") or "")
    files = _existing_files(target)
    if not files and not name and _SERVICE_ACCOUNT_NAMESPACE.exists():
        namespace = target.namespace or _SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
        return SelectedCluster(
            ClusterNamespace("", namespace), target._replace(namespace=namespace)
        )
    if not files:
        raise ClusterProblem(_no_kubeconfig(target))
    file = os.pathsep.join(files)
    if not contexts:
        raise ClusterProblem(
            f"Kubeconfig {file} has no contexts. Select another one with --kubeconfig or"
            " KUBECONFIG."
        )
    if name not in contexts:
        problem = f"has no context {name}" if name else "selects no context"
        raise ClusterProblem(
            f"Kubeconfig {file} {problem}. Its contexts: {', '.join(sorted(contexts))}.\n"
            "Add --context, or run: kubectl config use-context NAME"
        )
    context = object_at(contexts[name], "context")
    cluster, user = str(context.get("cluster") or ""), str(context.get("user") or "")
    for kind, part, known in (("cluster", cluster, clusters), ("user", user, users)):
        if part in known or (not part and kind == "user"):
            continue
        problem = f"needs {kind} {part}, which the file does not have" if part else f"has no {kind}"
        raise ClusterProblem(
            f"Context {name} of kubeconfig {file} {problem}.\n"
            f"Correct it: kubectl config set-context {name} --{kind}=NAME"
        )
    server = str(object_at(clusters[cluster], "cluster").get("server") or "")
    namespace = target.namespace or str(context.get("namespace") or "default")
    where = ClusterNamespace(server, namespace)
    return SelectedCluster(where, Target(target.kubeconfig, name, namespace))


def _read_config(target: Target) -> "JsonObject":
    """The kubeconfig as kubectl merges it, without credentials. Raises ClusterProblem."""
    if target.kubeconfig and not Path(target.kubeconfig).exists():
        raise ClusterProblem(_no_kubeconfig(target))
    flags = Target(target.kubeconfig).flags()
    command = [find_kubectl(), "config", "view", "--output=json", *flags]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_START_SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterProblem(
            f"kubectl config view did not end within {_START_SECONDS:.0f} s."
        ) from None
    if result.returncode:
        text = result.stderr.decode(errors="replace").strip()
        match = _LOADING.search(text)
        file, why = match.groups() if match else (":".join(_files(target)), text)
        if why.startswith(_NO_CONFIG):
            why = "it is not a kubeconfig."
        raise ClusterProblem(
            f"Cannot read kubeconfig {file}: {why}\nCorrect the file, or select another one with"
            " --kubeconfig."
        )
    try:
        config: JsonObject = json.loads(result.stdout)
    except ValueError:
        raise ClusterProblem("kubectl config view printed no JSON. Update kubectl.") from None
    return config


def _files(target: Target) -> list[str]:
    """The kubeconfig files that kubectl reads."""
    if target.kubeconfig:
        return [target.kubeconfig]
    named = [file for file in os.environ.get("KUBECONFIG", "").split(os.pathsep) if file]
    return named or [str(home() / ".kube" / "config")]


def _existing_files(target: Target) -> list[str]:
    return [file for file in _files(target) if Path(file).exists()]


def _no_kubeconfig(target: Target) -> str:
    file = os.pathsep.join(_files(target))
    if target.kubeconfig:
        return f"Kubeconfig {file} does not exist. Correct --kubeconfig."
    if os.environ.get("KUBECONFIG"):
        return f"Kubeconfig {file} does not exist. Correct the variable KUBECONFIG."
    return (
        f"No cluster is configured: {file} does not exist. Select a kubeconfig with --kubeconfig or"
        " KUBECONFIG.\nWithout a cluster: kubectl torchrun run --local"
    )


def _by_name(config: "JsonObject", kind: str) -> "dict[str, JsonObject]":
    from torchrun_api.json import objects_at

    return {str(item.get("name")): item for item in objects_at(config, kind)}


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
