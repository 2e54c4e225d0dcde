"""A debugger in a rank: pdb on this terminal, or a local port for an editor.

The helper in the pod is a program with pipes: `kubectl exec`, or a process of this machine.
torchrun_runtime.launch.debug describes the messages. Nothing listens in the pod.
"""

import base64
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kubectl_torchrun import text
from kubectl_torchrun.cluster.kubectl import LastLines
from kubectl_torchrun.errors import SUCCEEDED, ClusterProblem, UsageProblem
from kubectl_torchrun.terminal import Display
from torchrun_api.contract.launch import WORKSPACE_TARGET

PORT = 5678  # as of debugpy and of the editors
_HOST = "127.0.0.1"
_ALIVE_SECONDS = 5.0  # the helper ends after 30 s without a line
_END_SECONDS = 5.0
_CHUNK = 1 << 16
_TIMEOUTS = (
    "While the rank stands still, hang watches pause, but the other ranks wait in a collective:"
    " NCCL ends it after 10 minutes by default, gloo after 30. Only"
    " init_process_group(timeout=...) changes this."
)


class DebugRequest(NamedTuple):
    """What to debug. port: None for a free one. is_local: files have the same paths in the run."""

    job: str
    rank: int
    is_pdb: bool
    port: int | None
    is_local: bool

    @property
    def arguments(self) -> list[str]:
        """Arguments of the helper."""
        return ["debug", str(self.rank), "pdb" if self.is_pdb else "debugpy"]


class _Facts(msgspec.Struct):
    """Where the rank is."""

    rank: int
    pid: int
    node: str | None = None
    workspace: str | None = None

    def __str__(self) -> str:
        node = f"node {self.node}, " if self.node else ""
        return f"rank {self.rank} ({node}pid {self.pid})"


class _Message(msgspec.Struct):
    """A line of the helper."""

    ready: _Facts | None = None
    data: str | None = None
    closed: bool = False
    note: str | None = None
    end: str | None = None
    error: str | None = None
    kind: str = ""


def debug(command: Sequence[str], request: DebugRequest, terminal: Display) -> int:
    """Debug a rank until it is detached; the exit code. Raises Problem.

    command: starts the helper.
    """
    helper = _Helper(command)
    try:
        return _follow(helper, request, terminal)
    except KeyboardInterrupt:
        terminal.interrupted()
        terminal.note(f"Detached from rank {request.rank}. The run goes on.")
        return SUCCEEDED
    finally:
        helper.close()


def _follow(helper: "_Helper", request: DebugRequest, terminal: Display) -> int:
    session: _Session | None = None
    try:
        while True:
            readers = [helper.out, *(session.readers() if session else ())]
            ready, _, _ = select.select(readers, [], [], _ALIVE_SECONDS)
            helper.keep_alive()
            for message in helper.messages() if helper.out in ready else ():
                if message.error is not None:
                    raise _problem(message, request)
                if message.end is not None:
                    terminal.note(message.end)
                    return SUCCEEDED
                if message.note is not None:
                    terminal.note(message.note)
                if message.ready is not None:
                    make = _Terminal if request.is_pdb else _Editor
                    session = make(helper, message.ready, request, terminal)
                if session is not None:
                    session.receive(message)
            if session is not None:
                session.serve(ready)
    finally:
        if session is not None:
            session.close()


def _problem(message: _Message, request: DebugRequest) -> UsageProblem | ClusterProblem:
    job, rank = request.job, request.rank
    match message.kind:
        case "ranks":
            where = "" if request.is_local else " on its node, whose command has started others"
            return UsageProblem(f"Job {job} has no rank {rank}{where}. Ranks: {message.error}.")
        case "none":
            return UsageProblem(
                f"Rank {rank} of job {job} runs no Python yet. Try again once it has started:"
                f" kubectl torchrun logs {shlex.quote(job)} --follow"
            )
        case "missing":
            return UsageProblem(
                f"Rank {rank} cannot import debugpy ({message.error}). Add debugpy to the"
                " requirements of the job, to its setupCommand or to its image, or use --pdb, which"
                " needs nothing."
            )
    return ClusterProblem(message.error or "The debugger has failed.")


class _Helper:
    """The helper in the pod."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C must reach only this program
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self.out = self._process.stdout.fileno()
        self._errors = LastLines(self._process.stderr)
        self._decoder = msgspec.json.Decoder(_Message)
        self._read = b""
        self._told_at = 0.0

    def messages(self) -> Iterator[_Message]:
        """Yield the messages that have arrived. Raises ClusterProblem after the last one."""
        data = os.read(self.out, _CHUNK)
        if not data:
            lines = self._errors.after_end()
            why = lines[-1] if lines else "the connection to the pod was lost"
            raise ClusterProblem(f"The debugger has ended: {why}")
        *lines_read, self._read = (self._read + data).split(b"\n")
        for line in lines_read:
            try:
                yield self._decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ClusterProblem(f"The launcher of the job cannot debug: {error}") from error

    def send_message(self, **message: object) -> None:
        """Write a message; a helper that has ended says so itself."""
        self._told_at = time.monotonic()
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def pass_on(self, data: bytes) -> None:
        """Write what the user or the editor has written."""
        self.send_message(data=base64.b64encode(data).decode())

    def keep_alive(self) -> None:
        """Tell the helper that this program runs, if it is time."""
        if time.monotonic() - self._told_at >= _ALIVE_SECONDS - 1:
            self.send_message()

    def close(self) -> None:
        """End the helper, which detaches."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class _Session(Protocol):
    """The user's end of the debugger."""

    def readers(self) -> list[int]:
        """The descriptors to read from."""

    def serve(self, ready: Sequence[int]) -> None:
        """Read from those that are ready."""

    def receive(self, message: _Message) -> None:
        """Show or pass on what the debugger has written."""

    def close(self) -> None:
        """Close all descriptors."""


class _Terminal:
    """pdb on this terminal."""

    def __init__(
        self, helper: _Helper, facts: _Facts, request: DebugRequest, terminal: Display
    ) -> None:
        self._helper = helper
        self._readers = [sys.stdin.fileno()]
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        terminal.note(
            f"Stopped {facts}. Without breakpoints, c detaches; so does Ctrl-D. The run goes on."
        )
        terminal.note(_TIMEOUTS)

    def readers(self) -> list[int]:
        """Stdin until its end."""
        return self._readers

    def serve(self, ready: Sequence[int]) -> None:
        """Pass on what the user has typed."""
        for descriptor in [each for each in self._readers if each in ready]:
            data = os.read(descriptor, _CHUNK)
            if data:
                self._helper.pass_on(data)
            else:
                self._readers = []
                self._helper.send_message(eof=True)

    def receive(self, message: _Message) -> None:
        """Print what pdb has written."""
        if message.data:
            text.echo(self._decode(base64.b64decode(message.data)), nl=False)

    def close(self) -> None:
        """Nothing to close: stdin remains."""


class _Editor:
    """A local port that editors connect to, one after the other."""

    def __init__(
        self, helper: _Helper, facts: _Facts, request: DebugRequest, terminal: Display
    ) -> None:
        self._helper = helper
        self._client: socket.socket | None = None
        self._listener = _listen(request.port)
        port = self._listener.getsockname()[1]
        for line in _instructions(facts, request, port):
            terminal.note(line)

    def readers(self) -> list[int]:
        """The port, and the editor that is connected."""
        sockets = [self._listener, *([self._client] if self._client else [])]
        return [each.fileno() for each in sockets]

    def serve(self, ready: Sequence[int]) -> None:
        """Accept an editor, and pass on what it has written."""
        if self._client is not None and self._client.fileno() in ready:
            data = _receive(self._client)
            if data:
                self._helper.pass_on(data)
            else:
                self._close_client()
                self._helper.send_message(close=True)
        if self._listener.fileno() in ready:
            client, address = self._listener.accept()
            if not _is_of_this_user(address[1]):
                client.close()
                return
            if self._client is not None:  # an editor may forget to close its connection
                self._close_client()
                self._helper.send_message(close=True)
            self._client = client
            self._helper.send_message(open=True)

    def receive(self, message: _Message) -> None:
        """Pass on what debugpy has written."""
        if message.closed:
            self._close_client()
        elif message.data and self._client is not None:
            with suppress(OSError):  # the next read sees the end
                self._client.sendall(base64.b64decode(message.data))

    def close(self) -> None:
        """Close the port and the connection."""
        self._close_client()
        self._listener.close()

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _listen(port: int | None) -> socket.socket:
    """Listen on the port, which editors propose if none is given, or on a free one."""
    if port is None:
        with suppress(OSError):
            return socket.create_server((_HOST, PORT))
    try:
        return socket.create_server((_HOST, port or 0))
    except OSError as error:
        raise UsageProblem(
            f"Cannot listen on port {port} of {_HOST}: {error.strerror}. Use another --port."
        ) from error


def _receive(client: socket.socket) -> bytes:
    try:
        return client.recv(_CHUNK)
    except OSError:
        return b""


def _is_of_this_user(port: int) -> bool:
    """Whether a local end of a connection is of this user, where the system tells (proc(5))."""
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f":{port:04X}"):
                return int(fields[7]) == os.getuid()
    return True


def _instructions(facts: _Facts, request: DebugRequest, port: int) -> list[str]:
    """What to do in an editor."""
    configuration: dict[str, object] = {
        "name": f"rank {facts.rank} of {request.job}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": _HOST, "port": port},
        "justMyCode": False,
    }
    folder = facts.workspace or WORKSPACE_TARGET.default
    if not request.is_local:
        configuration["pathMappings"] = [{"localRoot": str(Path.cwd()), "remoteRoot": folder}]
    return [
        f"{str(facts).capitalize()} accepts an editor at {_HOST}:{port} until Ctrl-C, and runs on"
        " to its breakpoints.",
        "VS Code, among the configurations of .vscode/launch.json:",
        f"  {json.dumps(configuration)}",
        f"PyCharm: a configuration Attach to DAP, remote address {_HOST}:{port}, remote project"
        f" path {folder}",
        f"Others: attach to {_HOST}:{port}, as to debugpy --listen.",
        _TIMEOUTS,
    ]
