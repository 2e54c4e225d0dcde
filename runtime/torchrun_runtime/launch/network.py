"""Which network NCCL uses on this node, from NCCL's log.

If NCCL finds no fast network it uses TCP, and says so only with NCCL_DEBUG=INFO. Each Python of the
command that forms a group of torch asks NCCL for this log (rank/sitecustomize.py), unless the user
has set any NCCL_DEBUG variable. The log goes to a named pipe, which the launcher reads until the
command has ended: a file would grow without bound, because NCCL keeps it open and writes to it with
each communicator. NCCL writes each line at once (setlinebuf in its src/debug.cc), so lines of
several processes do not mix.

NCCL documents no format. Those below are from its source, 2.18 to 2.32, and from aws-ofi-nccl:

    Channel 00/0 : 3[3] -> 4[0] [send] via NET/Socket/0      a connection to another node
    NET/Socket : Using [0]eth0:10.0.4.51<0> [1]eth1:...      the interfaces by number
    NET/OFI Selected provider is efa, fabric is efa (...)    of libfabric

`Using network Socket` says less: NCCL writes it for groups inside of a node as well, and before
NVLink between nodes. A line that is not known is no claim.
"""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress
from typing import Callable

from .gang.messages import NcclTransport
from .gang.rounds import Rounds
from .output import say
from .supervise import StopRequest
from .threads import start_thread

PIPE = "nccl.log"  # in the folder of reports, see rank/sitecustomize.py
SOCKET = "Socket"
_CHUNK = 64 << 10
_LONGEST_LINE = 4 << 10  # bytes; NCCL's own limit of a prefix and a format is 1024
_MOST_WARNINGS = 50  # lines of a round
_LONGEST_NAME = 40  # characters
_CLOSE_SECONDS = 1.0
_WARNING = " NCCL WARN "
_CONNECTION = re.compile(r" \[(?:send|receive)\] via NET/([^/]+)/(\d+)")
_INTERFACES = re.compile(r" NCCL INFO NET/Socket : Using(.*)")
_INTERFACE = re.compile(r" \[(\d+)\]([^\s:]+):")
_PROVIDER = re.compile(r" NET/OFI Selected [Pp]rovider is ([^\s,]+)")


class TransportFinder:
    """Finds the network in the lines of NCCL's log, of all processes of a node.

    transport: None until the first connection to another node. With several networks, Socket wins,
    because it is the slowest.
    """

    def __init__(self) -> None:
        self.transport: NcclTransport | None = None
        self._interfaces: dict[str, str] = {}
        self._provider = ""

    def read(self, line: str) -> None:
        """Look at one line."""
        if self.transport is not None and self.transport.name == SOCKET:
            return
        interfaces, provider = _INTERFACES.search(line), _PROVIDER.search(line)
        if interfaces:
            self._interfaces = dict(_INTERFACE.findall(interfaces.group(1)))
        elif provider:
            self._provider = provider.group(1)
        connection = _CONNECTION.search(line)
        if connection is None:
            return
        name, number = connection.groups()
        if self.transport is None or name == SOCKET:
            device = self._interfaces.get(number, "") if name == SOCKET else ""
            if name.endswith("Libfabric"):
                device = self._provider
            self.transport = NcclTransport(name[:_LONGEST_NAME], device[:_LONGEST_NAME])


class NetworkLog:
    """Reads NCCL's log from a named pipe in a folder, in a thread, until it is closed.

    A warning is a line of the launcher, up to _MOST_WARNINGS.
    """

    def __init__(self, folder: str) -> None:
        self._finder = TransportFinder()
        self._warnings = 0
        self._path = os.path.join(folder, PIPE)
        os.mkfifo(self._path, 0o600)
        # Also open to write: NCCL's open must not wait for a reader, and the pipe must not end.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake, self._end = os.pipe()
        self._thread = start_thread(self._run)

    @property
    def transport(self) -> NcclTransport | None:
        """What this node uses, as far as it is known."""
        return self._finder.transport

    def close(self) -> None:
        """Read what is left, and end. Processes that are still there get an error."""
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._end)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        rest = b""
        while True:
            ready = dict(poller.poll())
            while data := self._read_chunk():
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-_LONGEST_LINE:]
                for line in lines:
                    # Without a reader NCCL would block: no error may end the thread.
                    with suppress(Exception):
                        self._read_line(line)
            if self._wake in ready:
                break
        os.close(self._descriptor)
        os.close(self._wake)

    def _read_chunk(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self._descriptor, _CHUNK)
        return b""

    def _read_line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode("utf-8", "replace")
        self._finder.read(text)
        if _WARNING not in text:
            return
        self._warnings += 1
        if self._warnings <= _MOST_WARNINGS:
            say(text)
        elif self._warnings == _MOST_WARNINGS + 1:
            say("more warnings of NCCL are not shown: set NCCL_DEBUG=WARN")


def open_network_log(folder: str) -> NetworkLog | None:
    """The log of a round; None if the folder can have no named pipe."""
    with suppress(OSError):
        return NetworkLog(folder)
    return None


class NetworkWatch:
    """A watchdog that tells the leader of the gang what this node uses. It requests no stop.

    announce: called on the leader, after a node has reported another transport.
    """

    def __init__(self, rounds: Rounds, log: NetworkLog, announce: Callable[[], None]) -> None:
        self._rounds = rounds
        self._log = log
        self._announce = announce
        self._said: NcclTransport | None = None
        self._announced = rounds.networks()

    def check(self) -> StopRequest | None:
        """Look at what is known. Call it about every second, and at the end of the command."""
        transport = self._log.transport
        if transport is not None and transport != self._said:
            self._said = transport
            say(f"NCCL uses {transport.describe()}")
            self._rounds.note_transport(transport)
        networks = self._rounds.networks()
        if networks != self._announced:
            self._announced = networks
            self._announce()
        return None

    def on_stop(self, *, leaving: bool) -> None:
        """Nothing to do."""
