"""Container logs that continue after a lost connection, and their merge by time."""

import heapq
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple, Protocol

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError
from kubectl_torchrun.cluster.pods import Ranks
from kubectl_torchrun.logs.torchrun_report import (
    RANK_MARK,
    REPORT_LINES,
    ReportFolder,
    StampedLine,
)
from torchrun_api.names import TRAINER_CONTAINER

_DELAY_SECONDS = 0.2
_MOST_WAITING = 50_000


class LineFormat(NamedTuple):
    """What stands before each printed line."""

    timestamps: bool = False
    prefix: bool = True

    def format(self, stamp: bytes, line: bytes) -> bytes:
        """The line, after its time with `timestamps`. stamp: empty if unknown."""
        if not (self.timestamps and stamp):
            return line
        # Only the end of a line that overwrites itself, because it would also overwrite its time.
        return stamp + b" " + line.rstrip(b"\r\n").rpartition(b"\r")[2]


class View(NamedTuple):
    """Which lines of a gang's logs are shown.

    nodes, ranks: the selected ones; all if both are empty. of_nodes: the ranks of each node.
    tail: last lines of each node; since: age in seconds. Both apply to the first read only.
    raw: torchrun's reports of failed ranks are not folded.
    """

    nodes: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()
    of_nodes: Ranks = Ranks()
    tail: int | None = None
    since: float | None = None
    line_format: LineFormat = LineFormat()
    raw: bool = False

    def takes(self, node: int) -> bool:
        """Whether this node's log is read at all."""
        if not self.nodes and not self.ranks:
            return True
        return node in self.nodes or any(self.of_nodes.node_of(rank) == node for rank in self.ranks)

    def shows(self, node: int, line: bytes) -> bool:
        """Whether a line is shown. Lines with the mark of another rank are not."""
        if not self.ranks or node in self.nodes:
            return True
        mark = RANK_MARK.match(line)
        return mark is None or self.of_nodes.first_of(node) + int(mark[1]) in self.ranks

    @property
    def lines_to_read(self) -> int | None:
        """Last lines of each node to read: `tail`, and a report that is folded; None for all."""
        return self.tail if self.tail is None or self.raw else self.tail + REPORT_LINES

    def fold(self, lines: "NodeLines") -> "NodeLines":
        """A node's log with folded reports, unless `raw`."""
        return lines if self.raw else FoldedLines(lines, self.tail)

    def query(self) -> dict[str, str]:
        """Query parameters for the start of the log."""
        query = {}
        if self.lines_to_read is not None:
            query["tailLines"] = str(self.lines_to_read)
        if self.since is not None:
            query["sinceSeconds"] = str(max(round(self.since), 1))
        return query


ALL = View()


class Cursor:
    """A position in a container's log. After a failure, `read` continues after the last line."""

    def __init__(
        self, api: Api, pod: str, view: View = ALL, container: str = TRAINER_CONTAINER
    ) -> None:
        self.stamp = b""  # RFC 3339 with nine digits of a second, as the kubelet writes it
        self._api = api
        self._pod = pod
        self._container = container
        self._view = view

    async def read(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines from here; with `follow`, until the container ends or the connection does.

        `ended`: the container has ended. Otherwise a last line without newline is incomplete, and
        the next read returns it as a whole.
        """
        query = {"timestamps": "true", "follow": str(follow).lower()}
        behind = self.stamp
        query |= {"sinceTime": behind.decode()} if behind else self._view.query()
        async with self._api.log(self._pod, self._container, query) as lines:
            async for line in lines:
                stamp, _, text = line.partition(b" ")
                whole = has_ended or line.endswith(b"\n")
                # sinceTime counts in whole seconds. Lines of the kubelet have no time, such as
                # "unable to retrieve container logs" for a container that is removed meanwhile.
                if whole and stamp[:1].isdigit() and stamp > behind:
                    self.stamp = stamp
                    yield text.removesuffix(b"\n")


class NodeLines(Protocol):
    """The log of a node. `stamp` is the time of the last line that was read."""

    stamp: bytes

    def read(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines from here, as a Cursor reads them."""
        ...


class FoldedLines:
    """A node's log in which each report of torchrun is one line. See ReportFolder.

    tail: lines to yield of a read that does not follow; None for all.
    """

    def __init__(self, lines: NodeLines, tail: int | None = None) -> None:
        self.stamp = b""
        self._lines = lines
        self._tail = tail
        self._folder = ReportFolder()

    async def read(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines from here, as a Cursor reads them; pending lines at the end of the log."""
        folded = self._fold(follow=follow, has_ended=has_ended)
        if self._tail is not None and not follow:
            last = deque([line async for line in folded], maxlen=self._tail)
            for line in last:
                self.stamp = line.stamp
                yield line.text
            return
        async with aclosing(folded):
            async for line in folded:
                self.stamp = line.stamp
                yield line.text

    async def _fold(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[StampedLine, None]:
        async with aclosing(self._lines.read(follow=follow, has_ended=has_ended)) as lines:
            async for text in lines:
                for line in self._folder.feed(StampedLine(self._lines.stamp, text)):
                    yield line
        if has_ended:
            for line in self._folder.release():
                yield line


async def merged(
    cursors: Sequence[tuple[int, NodeLines]], view: View, note: Callable[[str], None]
) -> AsyncIterator[tuple[int, bytes]]:
    """The logs so far of these workers (node and its lines), in the order of their times.

    A node whose kubelet does not answer costs only its own lines: `note` gets the reason.
    """
    async with AsyncExitStack() as stack:
        heads: list[tuple[bytes, int, bytes]] = []
        readers: dict[int, tuple[NodeLines, AsyncGenerator[bytes, None]]] = {}
        for node, cursor in cursors:
            lines = await stack.enter_async_context(
                aclosing(cursor.read(follow=False, has_ended=True))
            )
            readers[node] = (cursor, lines)
            first = await _next(node, lines, note)
            if first is not None:
                heads.append((cursor.stamp, node, first))
        heapq.heapify(heads)
        while heads:
            stamp, node, line = heads[0]
            if view.shows(node, line):
                yield node, view.line_format.format(stamp, line)
            cursor, lines = readers[node]
            following = await _next(node, lines, note)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (cursor.stamp, node, following))


async def _next(
    node: int, lines: AsyncGenerator[bytes, None], note: Callable[[str], None]
) -> bytes | None:
    """The next line; None at the end, or if the pod, its container or its kubelet is gone."""
    try:
        return await anext(lines, None)
    except RequestError as error:
        if error.status in (400, 404):
            return None
        if error.status >= 500:  # of the API server, which asks the kubelet
            note(f"Cannot read the log of node {node}: {error.message}")
            return None
        raise


class Window:
    """Sorts lines of several workers by time: each line waits for a moment for older ones."""

    def __init__(self, show: Callable[[int, bytes], None]) -> None:
        self._show = show
        self._waiting: list[tuple[bytes, int, int, bytes]] = []
        self._count = itertools.count()
        # When each waiting line was added, and its number; also of lines that are printed already.
        self._arrivals: deque[tuple[float, int]] = deque()
        self._printed: set[int] = set()

    def add(self, stamp: bytes, node: int, line: bytes) -> None:
        """Add a line with its time."""
        number = next(self._count)
        self._arrivals.append((anyio.current_time(), number))
        heapq.heappush(self._waiting, (stamp, number, node, line))
        if len(self._waiting) > _MOST_WAITING:
            self.flush(0)

    def flush(self, delay: float = _DELAY_SECONDS) -> None:
        """Print the lines that have waited long enough, and the lines before them.

        A node whose clock is late would otherwise delay the others while it prints.
        """
        until = anyio.current_time() - delay
        while self._arrivals:
            added, number = self._arrivals[0]
            if number in self._printed:
                self._printed.remove(number)
                self._arrivals.popleft()
            elif added > until:
                return
            else:
                _, first, node, line = heapq.heappop(self._waiting)
                self._printed.add(first)
                self._show(node, line)

    async def run(self) -> None:
        """Run until cancelled; then print all remaining lines."""
        try:
            while True:
                await anyio.sleep(_DELAY_SECONDS / 4)
                self.flush()
        finally:
            self.flush(0)
