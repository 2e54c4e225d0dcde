"""The helper of `kubectl torchrun debug` in a pod: it connects a rank's debugger with the command.

The plugin starts it by `kubectl exec`, so who may exec may debug. stdin and stdout carry one JSON
object a line; `data` is base64. No line for _LOST_SECONDS ends the debugger: the laptop was closed.

    from the plugin                          to the plugin
    {}                 it is still there     {"ready": {...}}    the rank, which answers
    {"data": ""}                             {"data": ""}
    {"open": true}     an editor connects    {"closed": true}    the debugger ends the session
    {"close": true}    the editor has left   {"note": ""}        a line for the user
    {"eof": true}      end of the input      {"end": ""}, {"error": "", "kind": ""}   the last line

After a signal, the rank connects to a Unix socket in the folder of reports (see
rank/torchrun_debugger.py). debugpy speaks TCP only: the helper listens on the loopback interface
until the rank has connected, and accepts nobody else. A lock, which the kernel releases with the
helper, tells the launcher that someone debugs.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import IO, Mapping, NamedTuple, NoReturn

from .contract import NODE_RANK, WORKSPACE_TARGET
from .processes import Process, alive, below, handles, ranks, send, variable
from .stacks import commands, take_stacks

DEBUG_SIGNAL = signal.SIGRTMAX - 2
SOCKET = "debug."  # and the pid: rank.torchrun_debugger
LOCK = "debugger."  # and the pid
_LOST_SECONDS = 30  # the plugin writes every 5 s
_LOCK_SECONDS = 2.0
_NOTICE_SECONDS = 1.0  # until a rank that has not answered is called busy
_CONNECT_SECONDS = 15.0
_POLL = 1.0
_CHUNK = 1 << 16
_HIGHEST_LINE = 1 << 26
_TOP = re.compile(rb'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class DebugError(Exception):
    """Why there is no debugger. kind: for the plugin, which adds what to do."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Rank(NamedTuple):
    """A rank and its Python process. folder: of the reports of its node."""

    number: int
    process: Process
    folder: str


def is_debugged(folder: str) -> bool:
    """Whether someone debugs a rank of this node."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(LOCK):
                with open(os.path.join(folder, name)) as file:
                    if not _lock(file, fcntl.LOCK_SH):
                        return True
    return False


def find_ranks(job: str = "") -> dict[int, Rank]:
    """The ranks that this process can see, by number. job: as of `stacks.snapshot`.

    A command without torchrun is the rank with the number of its node. A rank may be a shell: its
    Python is the topmost process that handles the signal.
    """
    found = {}
    for folder, tree in commands(job).items():
        for top in ranks(tree) or tree[:1]:
            number = variable(top.pid, "RANK") or variable(top.pid, NODE_RANK) or "0"
            inside = below([top], tree) if ranks(tree) else tree
            python = next((each for each in inside if handles(each, DEBUG_SIGNAL)), None)
            if python and number.isdigit():
                found[int(number)] = Rank(int(number), python, folder)
    return found


def main() -> int:
    """Debug the rank of the arguments: its number, pdb or debugpy, and the job if not the pod's."""
    number, debugger, job = [*sys.argv[2:], "", "", ""][:3]
    plugin = _Plugin()
    signal.signal(signal.SIGALRM, _raise_lost)
    try:
        rank = _find(int(number), job)
        with _Lock(rank):
            _debug(plugin, rank, debugger)
    except DebugError as error:
        plugin.send_message(error=str(error), kind=error.kind)
        return 1
    except (OSError, EOFError):
        return 1  # the plugin is gone
    return 0


def _raise_lost(*_: object) -> NoReturn:
    raise EOFError("the plugin is silent")


def _find(number: int, job: str) -> Rank:
    found = find_ranks(job)
    if number in found:
        return found[number]
    if not found:
        raise DebugError("No Python process runs here yet.", "none")
    numbers = sorted(found)
    is_row = numbers[-1] - numbers[0] == len(numbers) - 1 > 1
    listed = f"{numbers[0]}-{numbers[-1]}" if is_row else ", ".join(map(str, numbers))
    raise DebugError(listed, "ranks")


class _Lock:
    """The lock of a rank that is debugged. Raises DebugError if somebody else has it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._path = os.path.join(rank.folder, f"{LOCK}{rank.process.pid}")

    def __enter__(self) -> None:
        self._file = open(self._path, "a")
        until = time.monotonic() + _LOCK_SECONDS
        while not _lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise DebugError(f"Someone else debugs rank {self._rank.number} already.")
            time.sleep(0.05)  # the launcher has the lock for an instant, to look

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock(file: IO[str], how: int) -> bool:
    """Lock a file until it is closed; False if another process has locked it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Plugin:
    """The plugin at the other end of stdin and stdout."""

    def __init__(self) -> None:
        self._read = b""
        signal.alarm(_LOST_SECONDS)

    def fileno(self) -> int:
        """To wait for its lines."""
        return 0

    def lines(self) -> list[dict[str, object]]:
        """The lines that have arrived. Raises EOFError once it is gone."""
        data = os.read(0, _CHUNK)
        if not data:
            raise EOFError("the plugin has ended")
        signal.alarm(_LOST_SECONDS)
        *lines, self._read = (self._read + data).split(b"\n")
        if len(self._read) > _HIGHEST_LINE:
            raise EOFError("not a line of the plugin")
        return [json.loads(line) for line in lines]

    def send_message(self, **message: object) -> None:
        """Write a line."""
        view = memoryview(json.dumps(message).encode() + b"\n")
        while view:
            view = view[os.write(1, view) :]

    def pass_on(self, data: bytes) -> None:
        """Write what the debugger has written."""
        self.send_message(data=base64.b64encode(data).decode())


def _debug(plugin: _Plugin, rank: Rank, debugger: str) -> None:
    """Debug to the end, after which the rank goes on. Raises DebugError, OSError, EOFError."""
    connection = _reach(plugin, rank)
    try:
        with connection:
            connection.sendall(json.dumps({"debugger": debugger}).encode() + b"\n")
            facts = {
                "rank": rank.number,
                "pid": rank.process.pid,
                "node": variable(rank.process.pid, NODE_RANK),
                "workspace": variable(rank.process.pid, WORKSPACE_TARGET),
            }
            if debugger == "pdb":
                plugin.send_message(ready=facts)
                _follow_pdb(plugin, rank, connection)
            else:
                _Sessions(plugin, rank, connection).follow(facts)
    finally:
        send([rank.process], DEBUG_SIGNAL)  # to leave nothing behind
    how = "has been detached and goes on" if alive(rank.process) else "has ended"
    plugin.send_message(end=f"Rank {rank.number} {how}.")


def _reach(plugin: _Plugin, rank: Rank) -> socket.socket:
    """The connection of the rank, which answers at its next instruction of Python."""
    name = f"{SOCKET}{rank.process.pid}"
    path = os.path.join(rank.folder, name)
    place = os.open(rank.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"/proc/self/fd/{place}/{name}")  # the path may be too long for a socket
            listener.listen(1)
            send([rank.process], DEBUG_SIGNAL)
            notice_at = time.monotonic() + _NOTICE_SECONDS
            while True:
                ready = _ready(_POLL, plugin, listener)
                if listener in ready:
                    return listener.accept()[0]
                if plugin in ready:
                    plugin.lines()
                if not alive(rank.process):
                    raise DebugError(f"Rank {rank.number} has ended.")
                if time.monotonic() >= notice_at:
                    notice_at = float("inf")
                    plugin.send_message(note=_describe_call(rank))
        finally:
            os.close(place)
            with suppress(FileNotFoundError):
                os.unlink(path)


def _describe_call(rank: Rank) -> str:
    stacks = take_stacks(rank.folder, [rank.process])
    # faulthandler writes the main thread last.
    text = stacks[0].text.rpartition(b"most recent call first):")[2] if stacks else b""
    top = _TOP.search(text)
    where = ""
    if top:
        file, line, name = (os.fsdecode(part) for part in top.groups())
        where = f" ({name} in {file}, line {line})"
    return (
        f"Rank {rank.number} is in a call into C{where}. It answers when the call returns."
        " Ctrl-C stops waiting."
    )


def _follow_pdb(plugin: _Plugin, rank: Rank, connection: socket.socket) -> None:
    while True:
        ready = _ready(None, plugin, connection)
        if connection in ready:
            data = _receive(connection)
            if not data:
                return
            plugin.pass_on(data)
        for message in plugin.lines() if plugin in ready else ():
            with suppress(OSError):  # the loop sees the end of the connection
                if message.get("eof"):
                    connection.shutdown(socket.SHUT_WR)
                    send([rank.process], DEBUG_SIGNAL)  # it may run to a breakpoint
                elif "data" in message:
                    connection.sendall(base64.b64decode(str(message["data"])))


class _Sessions:
    """Sessions of editors with debugpy, one after the other."""

    def __init__(self, plugin: _Plugin, rank: Rank, connection: socket.socket) -> None:
        self._plugin = plugin
        self._rank = rank
        self._connection = connection
        self._debugger: socket.socket | None = None
        self._heard = b""

    def follow(self, facts: Mapping[str, object]) -> None:
        """Follow the plugin and the rank to the end of one of them."""
        plugin, connection = self._plugin, self._connection
        try:
            while True:
                ready = _ready(None, plugin, connection, *filter(None, [self._debugger]))
                if connection in ready:
                    data = _receive(connection)
                    if not data:
                        return
                    self._hear(data, facts)
                if self._debugger in ready:
                    self._pass_on()
                for message in plugin.lines() if plugin in ready else ():
                    self._obey(message)
        finally:
            self._close()

    def _hear(self, data: bytes, facts: Mapping[str, object]) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "missing" in message:
                raise DebugError(message["missing"], "missing")
            if "failed" in message:
                self._plugin.send_message(note=f"debugpy has failed: {message['failed']}")
                self._end_session()
            if "ready" in message:
                self._plugin.send_message(ready=facts)

    def _obey(self, message: dict[str, object]) -> None:
        if message.get("open"):
            self._open()
        elif message.get("close"):
            self._close()
        elif "data" in message and self._debugger:
            with suppress(OSError):
                self._debugger.sendall(base64.b64decode(str(message["data"])))

    def _pass_on(self) -> None:
        assert self._debugger
        data = _receive(self._debugger)
        if data:
            self._plugin.pass_on(data)
        else:
            self._end_session()

    def _open(self) -> None:
        """Let the rank connect: nobody else on the machine, whose pods may share its network."""
        self._close()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._say({"port": port})
            until = time.monotonic() + _CONNECT_SECONDS
            while time.monotonic() < until:
                if not select.select([listener], [], [], _POLL)[0]:
                    continue
                debugger, (_, peer, *_) = listener.accept()
                if _has_connection(self._rank.process, peer, port):
                    self._debugger = debugger
                    return
                debugger.close()
        self._plugin.send_message(note=f"debugpy of rank {self._rank.number} does not answer.")
        self._end_session()

    def _end_session(self) -> None:
        self._close()
        self._plugin.send_message(closed=True)

    def _close(self) -> None:
        """End the session as an editor does, so that a thread at a breakpoint goes on."""
        if self._debugger is None:
            return
        body = json.dumps({"seq": 1 << 30, "type": "request", "command": "disconnect",
                           "arguments": {"terminateDebuggee": False}}).encode()  # fmt: skip
        with suppress(OSError):
            self._debugger.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            self._debugger.shutdown(socket.SHUT_WR)
            self._debugger.settimeout(_POLL)
            while self._debugger.recv(_CHUNK):
                pass
        self._debugger.close()
        self._debugger = None
        self._say({})

    def _say(self, message: dict[str, object]) -> None:
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def _has_connection(process: Process, port: int, other_port: int) -> bool:
    """Whether this end of a TCP connection of the loopback interface belongs to the process."""
    ends = f":{port:04X}", f":{other_port:04X}"
    inodes = set()
    with suppress(OSError), open(f"/proc/{process.pid}/net/tcp") as file:
        for fields in (line.split() for line in file):
            if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
                inodes.add(f"socket:[{fields[9]}]")
    folder = f"/proc/{process.pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(os.path.join(folder, name)) in inodes:
                    return True
    return False


def _ready(seconds: float | None, *readers: _Plugin | socket.socket) -> list[object]:
    """Those of which something can be read; none after these seconds."""
    return [*select.select(readers, [], [], seconds)[0]]


def _receive(connection: socket.socket) -> bytes:
    """What has arrived; empty at the end, and after a loss."""
    try:
        return connection.recv(_CHUNK)
    except OSError:
        return b""
