"""Logs whose first lines the kubelet has removed; they are still in the copies on the PVC.

The kubelet starts a new file when a log reaches containerLogMaxSize (10 MiB), and the API server
reads only the newest file.
"""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.pods import rank_of, started_at
from kubectl_torchrun.logs.copies import LogCopy
from kubectl_torchrun.logs.streams import NodeLines, View
from torchrun_api.kinds.core import Pod
from torchrun_api.names import TRAINER_CONTAINER

# The first line of a log that is complete may be later than the start of its container.
_QUIET_SECONDS = 2.0
_DOUBTFUL_SECONDS = 10.0  # without a copy that shows whether there were lines before
_FIRST_BYTES = 8192
_LARGE_BYTES = 256 << 10  # of a file that follows one of 10 MiB, with a probability of 97 %
_FIRST_LINES = 20
# The launcher and the kubelet stamp the same line at slightly different times.
_SKEW_SECONDS = 5.0


class LateStart(NamedTuple):
    """A log that begins late. seconds: after its container. stamp: of the first of `lines`."""

    seconds: float
    stamp: bytes
    lines: tuple[bytes, ...]

    def note(self, node: int) -> str:
        """The message without a copy; "" if the beginning may just have been quiet."""
        if self.seconds < _DOUBTFUL_SECONDS:
            return ""
        return (
            f"The log of node {node} begins {output.duration(int(self.seconds))} after its start."
            " The kubelet removes the first lines of a large log, and there is no copy of them."
        )


async def find_late(api: Api, pods: Sequence[Pod], view: View) -> dict[int, LateStart]:
    """The logs of these pods, by node, that begin later than the view asks for."""
    late: dict[int, LateStart] = {}
    for pod in pods:
        begin = started_at(pod, TRAINER_CONTAINER)
        if begin is None:
            continue
        if view.since is not None:
            begin = max(begin, datetime.now(UTC) - timedelta(seconds=view.since))
        try:
            start = await _start(api, pod, begin)
            is_late = start is not None and start.seconds > _QUIET_SECONDS
            if start and is_late and await _is_large(api, pod) and await _is_short(api, pod, view):
                late[rank_of(pod)] = start
        except (RequestError, Unreachable):
            continue  # whoever reads the log reports it
    return late


async def _start(api: Api, pod: Pod, begin: datetime) -> LateStart | None:
    query = {"timestamps": "true", "limitBytes": str(_FIRST_BYTES)}
    async with api.log(pod.metadata.name, TRAINER_CONTAINER, query) as read:
        lines = [line.partition(b" ") async for line in read if line.endswith(b"\n")]
    if not lines or not lines[0][0][:1].isdigit():
        return None
    stamp = lines[0][0]
    first = datetime.strptime(f"{stamp[:19].decode()}Z", "%Y-%m-%dT%H:%M:%S%z")
    texts = tuple(text.removesuffix(b"\n") for _, _, text in lines[:_FIRST_LINES])
    return LateStart((first - begin).total_seconds(), stamp, texts)


async def _is_large(api: Api, pod: Pod) -> bool:
    """Whether the log may have been rotated. A script that is only quiet at first prints less."""
    size = 0
    query = {"limitBytes": str(_LARGE_BYTES)}
    async with api.log(pod.metadata.name, TRAINER_CONTAINER, query) as read:
        async for line in read:
            size += len(line)
    return size >= _LARGE_BYTES


async def _is_short(api: Api, pod: Pod, view: View) -> bool:
    """Whether the log has fewer lines than the view asks for."""
    if view.lines_to_read is None:
        return True
    query = {"tailLines": str(view.lines_to_read)}
    count = 0
    async with api.log(pod.metadata.name, TRAINER_CONTAINER, query) as read:
        async for _ in read:
            count += 1
    return count < view.lines_to_read


class JoinedLog:
    """A copy up to the first line of a log, then the log. tail: last lines of the first read."""

    def __init__(self, copy: LogCopy, start: LateStart, log: NodeLines, tail: int | None) -> None:
        self.stamp = b""
        self._copy: LogCopy | None = copy
        self._start = start
        self._log = log
        self._tail = tail

    async def read(self, *, follow: bool, has_ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines, as `Cursor.read` returns them."""
        joined = self._join(follow=follow, has_ended=has_ended)
        if self._tail is not None and not follow:
            last = deque([line async for line in joined], maxlen=self._tail)
            for self.stamp, text in last:
                yield text
            return
        async with aclosing(joined):
            async for self.stamp, text in joined:
                yield text

    async def _join(
        self, *, follow: bool, has_ended: bool
    ) -> AsyncGenerator[tuple[bytes, bytes], None]:
        copy, self._copy = self._copy, None
        if copy is not None:
            for line in islice(copy.stamped_lines(), _missing(copy, self._start)):
                yield line
        async with aclosing(self._log.read(follow=follow, has_ended=has_ended)) as lines:
            async for text in lines:
                yield self._log.stamp, text


def _missing(copy: LogCopy, start: LateStart) -> int:
    """How many lines of the copy come before the log: up to the same text at about that time."""
    moment = datetime.strptime(f"{start.stamp[:19].decode()}Z", "%Y-%m-%dT%H:%M:%S%z")
    earliest, latest = (
        f"{moment + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}".encode()
        for seconds in (-_SKEW_SECONDS, _SKEW_SECONDS)
    )
    window: deque[tuple[bytes, bytes]] = deque(maxlen=len(start.lines))
    by_time = 0
    for number, (stamp, text) in enumerate(copy.stamped_lines(), 1):
        by_time += stamp < start.stamp
        if stamp < earliest:
            continue
        window.append((stamp, text))
        if tuple(text for _, text in window) == start.lines:
            return number - len(window)
        if window[0][0][:19] > latest:
            break
    return by_time
