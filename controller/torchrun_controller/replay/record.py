"""Recording of the lists and watches of a controller. Nothing is written to the cluster."""

import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from torchrun_controller.cache.informer_factory import InformerFactory
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import Connection, Response, Transport
from torchrun_controller.replay.tape import Head, Tape, source_of
from torchrun_controller.watch.lines import LineSplitter, Overlong
from torchrun_controller.workqueue import WorkQueue


class RecordingTransport(Transport):
    """A transport that records all responses of `inner` on a tape."""

    def __init__(self, inner: Transport, tape: Tape) -> None:
        self._inner = inner
        self._tape = tape

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = {},
        timeout: float = 30.0,  # noqa: ASYNC109 as in Transport
    ) -> Response:
        """See `Transport.request`."""
        response = await self._inner.request(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            headers=headers,
            timeout=timeout,
        )
        first = "continue" not in query
        self._tape.page(source_of(path, query), response.body, first=first)
        return response

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float = 90.0, total: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """See `Transport.stream`."""
        source = source_of(path, query)
        async with self._inner.stream(path, query=query, silence=silence, total=total) as chunks:
            if "sendInitialEvents" in query:
                self._tape.opens(source)
            yield _RecordedChunks(chunks, source, self._tape)


class _RecordedChunks(AsyncIterator[bytes]):
    """The bytes of a watch, recorded line by line; a generator would outlive a `break`."""

    def __init__(self, chunks: AsyncIterator[bytes], source: str, tape: Tape) -> None:
        self._chunks = chunks
        self._source = source
        self._tape = tape
        self._lines = LineSplitter()

    async def __anext__(self) -> bytes:
        chunk = await anext(self._chunks)
        for line in self._lines.feed(chunk):
            if not isinstance(line, Overlong):
                self._tape.frame(self._source, line)
        return chunk


async def record(
    path: Path,
    head: Head,
    *,
    limit: int,
    kubeconfig: str | None = None,
    context: str | None = None,
) -> Tape:
    """Record to `path` until SIGINT, SIGTERM or `limit` bytes; return the closed tape.

    `kubeconfig` and `context` are those of `Connection.load`. Raises ConfigError without a usable
    connection, and OSError (FileExistsError) if the file cannot be created.
    """
    connection = await Connection.load(kubeconfig, context)
    tape = Tape(path, head, limit)
    try:
        async with connection.session("record") as session:
            queue: WorkQueue[Key] = WorkQueue(lambda: 0.0)  # its keys are not taken
            factory = InformerFactory(RecordingTransport(session, tape), queue, head.namespaces)
            await _run(factory, tape)
    finally:
        tape.close()
    return tape


async def _run(factory: InformerFactory, tape: Tape) -> None:
    async with anyio.create_task_group() as tasks:
        for informer in factory.informers:
            tasks.start_soon(informer.run)
        tasks.start_soon(factory.discovery.run)
        tasks.start_soon(factory.groups.run)
        tasks.start_soon(_until_full, tape, tasks.cancel_scope)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            await anext(aiter(signals))
        tasks.cancel_scope.cancel()


async def _until_full(tape: Tape, scope: anyio.CancelScope) -> None:
    await tape.full.wait()
    scope.cancel()
