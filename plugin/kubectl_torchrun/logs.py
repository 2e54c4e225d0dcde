"""Container logs that survive a lost connection, and the merge of many by time."""

import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing

from kubectl_torchrun.api import Api
from torchrun_api.names import TRAINER_CONTAINER


class Cursor:
    """A place in one worker's log. After a failure, `read` goes on behind the last line read."""

    def __init__(self, api: Api, pod: str) -> None:
        self.stamp = b""  # RFC 3339 with nine digits of a second, as the kubelet writes it
        self._api = api
        self._pod = pod

    async def read(self, *, follow: bool, ended: bool) -> AsyncGenerator[bytes, None]:
        """The lines from here; with `follow`, until the container ends or the connection does.

        `ended`: the container has; else a last line without an end was torn off, and comes again.
        """
        query = {"timestamps": "true", "follow": str(follow).lower()}
        behind = self.stamp
        if behind:
            query["sinceTime"] = behind.decode()
        async with self._api.log(self._pod, TRAINER_CONTAINER, query) as lines:
            async for line in lines:
                stamp, _, text = line.partition(b" ")
                whole = ended or line.endswith(b"\n")
                if whole and stamp > behind:  # sinceTime counts in whole seconds
                    self.stamp = stamp
                    yield text.removesuffix(b"\n")


async def merged(api: Api, pods: Sequence[tuple[int, str]]) -> AsyncIterator[tuple[int, bytes]]:
    """The logs so far of these workers (rank and pod), in the order of their times."""
    async with AsyncExitStack() as stack:
        heads: list[tuple[bytes, int, bytes]] = []
        readers: dict[int, tuple[Cursor, AsyncGenerator[bytes, None]]] = {}
        for rank, pod in pods:
            cursor = Cursor(api, pod)
            lines = await stack.enter_async_context(aclosing(cursor.read(follow=False, ended=True)))
            readers[rank] = (cursor, lines)
            async for line in lines:
                heads.append((cursor.stamp, rank, line))
                break
        heapq.heapify(heads)
        while heads:
            _, rank, line = heads[0]
            yield rank, line
            cursor, lines = readers[rank]
            following = await anext(lines, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (cursor.stamp, rank, following))
