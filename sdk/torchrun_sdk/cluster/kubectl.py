"""The client of the cluster: runs kubectl and its plugin, with all their authentication methods.

The plugin has a separate client, over HTTP. It is not shared: it needs Python 3.11 and other
packages, and this package runs in any image with Python 3.9. Functions that both need are in the
plugin: it uploads directories and reads logs and kept results for this package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Callable

from torchrun_sdk.cluster.cancel import Cancellation
from torchrun_sdk.errors import ClusterError, WrongRequest
from torchrun_sdk.serialization import LARGEST
from torchrun_sdk.text import escape

_PLUGIN = "kubectl-torchrun"
_INSTALL = "pipx install --force ./plugin in a checkout, or with the wheel of the release"
NO_DEFAULTS = "--no-defaults"
_TOO_OLD = re.compile(f"No such option.*({NO_DEFAULTS}|--status-file)")
PLUGIN_USAGE = 2  # exit code of the plugin
# Characters. A pod may print anything: a longer line is split, more output is an error. JSON
# escapes each quote of a value.
LONGEST_LINE = 2 * LARGEST + (1 << 20)
_LONGEST_OUTPUT = 2 * LONGEST_LINE
_LONGEST_ERROR_LINE, _ERROR_LINES = 1 << 16, 100
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Runs a program that ends with a line on the pipe $1 or when it closes, even because this process
# was killed. A watch would only end with its next change.
_GUARD = """
exec 4<"/dev/fd/$1"
exec 3<&0 </dev/null
shift
"$@" <&3 3<&- 4<&- &
program=$!
exec 3<&- >/dev/null 2>&1
{ read -r _ <&4; kill $program; } &
wait $program
code=$?
kill -KILL $!
wait
exit $code
"""


class Kubectl:
    """One namespace of one cluster: by default those that kubectl selects at the first command."""

    def __init__(self, namespace: str = "") -> None:
        self._namespace = namespace

    @cached_property
    def _flags(self) -> list[str]:
        """The flags that select cluster and namespace, the same for every command."""
        context, namespace = _current()
        selected = {"context": context, "namespace": self._namespace or namespace}
        return [f"--{name}={value}" for name, value in selected.items() if value]

    def command(self, *words: str) -> list[str]:
        """A command line of kubectl."""
        return [_find_kubectl(), *self._flags, *words]

    def plugin(self, *words: str) -> list[str]:
        """A command line of the plugin, without the defaults of a torchrun.toml."""
        return [find_plugin(), *self._flags, NO_DEFAULTS, *words]

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl and return its stdout. Raises ClusterError with its stderr."""
        return _run(self.command(*words), stdin)

    def create_missing(self, body: dict[str, Any]) -> None:
        """Create this object unless one of its name exists. Raises ClusterError."""
        name = body["metadata"]["name"]
        if self.run("get", body["kind"], name, "--ignore-not-found", "--output=name"):
            return
        try:
            self.run("create", "-f", "-", stdin=json.dumps(body))
        except ClusterError as error:
            if "(AlreadyExists)" not in str(error):  # another call has created it meanwhile
                raise

    def delete_job(self, name: str) -> bool:
        """Delete a job without waiting for its pods; whether it existed. Raises ClusterError."""
        words = ("delete", "torchrunjob", name, "--ignore-not-found", "--wait=false")
        return bool(self.run(*words))  # kubectl prints what it deletes

    def abandon_job(self, name: str, note: Callable[[str], None]) -> bool:
        """Delete a job, which no client waits for, after an error that matters more.

        Return whether a job was deleted. note: gets the reason if that is unknown.
        """
        try:
            return self.delete_job(name)
        except ClusterError as error:
            note(f"Job {name} may still exist: {error}\n  kt down {name}")
        except KeyboardInterrupt:
            note(f"Job {name} may still exist: interrupted\n  kt down {name}")
        return False

    def run_plugin(
        self, *words: str, stdin: str | None = None, cancellation: Cancellation | None = None
    ) -> str:
        """Run the plugin and return its stdout.

        Raises ClusterError with its stderr, WrongRequest for invalid usage, and Cancelled after
        ending the plugin.
        """
        return _run(self.plugin(*words), stdin, cancellation)


def _current() -> tuple[str, str]:
    """The context and the namespace that kubectl selects; "" where unknown."""
    try:
        text = _run([_find_kubectl(), "config", "view", "--minify", "--output=json"], None)
        config = json.loads(text)
        context = str(config["current-context"])
        body = config["contexts"][0]["context"]
        return context, str(body.get("namespace") or "default")
    except ClusterError:  # in a pod without a kubeconfig
        with suppress(OSError):
            return "", _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return "", ""


def _run(command: list[str], stdin: str | None, cancellation: Cancellation | None = None) -> str:
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as process,
        cancellation.waking(process.terminate) if cancellation else nullcontext(),
    ):
        try:
            errors = _Errors(process.stderr)
            if process.stdin is not None:
                with suppress(OSError), process.stdin:  # it may end without reading
                    process.stdin.write(stdin or "")
            assert process.stdout is not None
            stdout = process.stdout.read(_LONGEST_OUTPUT + 1)
            if len(stdout) > _LONGEST_OUTPUT:
                raise ClusterError(f"{command[0]} printed more than {_LONGEST_OUTPUT} characters")
            process.wait()
            stderr = errors.text()
        except BaseException:
            process.kill()
            raise
    if cancellation is not None:
        cancellation.check()
    if process.returncode:
        message = reason(stderr)
        is_usage = process.returncode == PLUGIN_USAGE and Path(command[0]).name == _PLUGIN
        error = WrongRequest if is_usage else ClusterError
        raise error(message or f"{command[0]} exited with code {process.returncode}")
    return stdout


def _find_kubectl() -> str:
    return _find("kubectl", "https://kubernetes.io/docs/tasks/tools/")


def find_plugin() -> str:
    """The path of the plugin. Raises ClusterError if it is not installed."""
    return _find(_PLUGIN, _INSTALL)


def _find(program: str, install: str) -> str:
    beside = str(Path(sys.executable).parent)
    path = shutil.which(program) or shutil.which(program, path=beside)
    if path is None:
        raise ClusterError(f"{program} is not on PATH. Install it: {install}")
    return path


class _Errors:
    """The last lines of the stderr of a program, which a thread reads."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=_ERROR_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self, lines: int = _ERROR_LINES) -> str:
        """The last lines, after the end of the program."""
        self._thread.join(1)
        return "\n".join([*self._lines][-lines:])

    def _read(self) -> None:
        for text in _lines(self._stream, _LONGEST_ERROR_LINE):
            self._lines.append(text.rstrip())


class Child:
    """A program. A thread passes the lines of its stdout to `line`, until it ends or is closed.

    A line of more than LONGEST_LINE characters is passed in pieces. The return value of `line` is
    written to the stdin of the program as a line. whole: skip a last line without newline, because
    it is incomplete. has_output: whether there was a line.
    """

    def __init__(
        self, command: list[str], line: Callable[[str], str | None], *, whole: bool = False
    ) -> None:
        self.has_output = False
        self._line = line
        self._whole = whole
        self._pipe, self._kept = _pipe()
        pipe = self._pipe.fileno()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(pipe), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # a pod may write any bytes
            bufsize=1,
            start_new_session=True,  # Ctrl-C must reach only this program
            pass_fds=(pipe,),
        )
        self._stdin_lock = threading.Lock()
        self._errors = _Errors(self._process.stderr)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a limited time; whether it has ended and all its lines were handled."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def exit_code(self) -> int:
        """Its exit code; waits for its end. 128 + number for a signal."""
        return self._process.wait()

    def send(self, line: str) -> None:
        """Write a line to its stdin; does nothing after its end."""
        stream = self._process.stdin
        with self._stdin_lock, suppress(BrokenPipeError, ValueError, OSError):
            if stream is not None:
                stream.write(line + "\n")
                stream.flush()

    def close_stdin(self) -> None:
        """Close its stdin."""
        with self._stdin_lock:
            _close(self._process.stdin)

    def stderr_tail(self) -> str:
        """The end of its stderr."""
        return self._errors.text(5)

    def has_crashed(self) -> bool:
        """Whether it is a Python program that has ended with a traceback."""
        return "Traceback (most recent call last):" in self._errors.text().split("\n")

    def close(self) -> None:
        """End it."""
        with suppress(OSError, ValueError):
            self._kept.write("\n")  # a fork of this process may keep the pipe open
            self._kept.flush()
        _close(self._kept)
        # Not before the write, which would be a SIGPIPE after the end of the program: it ends a
        # client that has the default action of this signal.
        _close(self._pipe)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            _close(stream)

    def _read(self) -> None:
        for text in _lines(self._process.stdout, LONGEST_LINE):
            if self._whole and not text.endswith("\n") and len(text) < LONGEST_LINE:
                continue
            self.has_output = True
            answer = self._line(text.rstrip("\n"))
            if answer is not None:
                self.send(answer)


def _pipe() -> tuple[IO[str], IO[str]]:
    """A pipe whose end to read can be passed to a program by its number.

    It is not that of a closed stdin, stdout or stderr, which the program has for itself.
    """
    import fcntl  # not on Windows

    low, kept = os.pipe()
    try:
        pipe = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(low)
    return os.fdopen(pipe), os.fdopen(kept, "w")


def _lines(stream: IO[str] | None, longest: int) -> Iterator[str]:
    """Yield lines, and those of more than `longest` characters in pieces."""
    try:
        while stream is not None and (text := stream.readline(longest)):
            yield text
    except (ValueError, OSError):  # closed during a read
        return


def _close(stream: IO[str] | None) -> None:
    with suppress(OSError, ValueError):
        if stream is not None:
            stream.close()


def run_attached(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a program at the terminal; its exit code, 128 + number for a signal.

    Ctrl-C reaches the program, which ends by itself: it may detach from a job first.
    Raises OSError.
    """
    with subprocess.Popen(command, env=environment) as process:
        while True:
            with suppress(KeyboardInterrupt):
                code = process.wait()
                return code if code >= 0 else 128 - code


def output_lines(command: list[str]) -> Generator[str, None, None]:
    """Run a program and yield the lines of its stdout, which together may be of any size.

    A line of more than LONGEST_LINE characters is yielded in pieces. Raises ClusterError with the
    program's stderr, after the last line.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            errors = _Errors(process.stderr)
            yield from _lines(process.stdout, LONGEST_LINE)
            process.wait()
            stderr = errors.text()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ClusterError(reason(stderr) or f"{command[0]} exited with code {process.returncode}")


def reason(stderr: str) -> str:
    """Why kubectl or the plugin failed, and what to do if the plugin is too old."""
    if _TOO_OLD.search(stderr):
        return f"{_PLUGIN} is older than this package. Install the same version: {_INSTALL}"
    return stderr.strip().removeprefix("Error: ")


def print_note(text: str) -> None:
    """Print a note on stderr, escaped, unless TORCHRUN_SDK_QUIET is set."""
    if not os.environ.get("TORCHRUN_SDK_QUIET"):
        print(escape(text), file=sys.stderr, flush=True)
