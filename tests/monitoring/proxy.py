"""A TCP proxy between a controller and the API server with injected faults."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit


class Proxy:
    """Runs in its own thread until `close`."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = parts.hostname, parts.port
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._delay = 0.0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(self._listen())
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every open connection."""

        async def cut() -> None:
            for writer in list(self._open):
                writer.transport.abort()

        self._do(cut())

    def slow(self, seconds: float) -> None:
        """Delay each piece of a response by this time."""
        self._loop.call_soon_threadsafe(setattr, self, "_delay", seconds)

    def close(self) -> None:
        """Accept no more connections, and break the open ones."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, downstream = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, downstream}
        answers = self._copy(upstream, writer, is_answer=True)
        with suppress(
            asyncio.CancelledError
        ):  # which asyncio streams of Python 3.11 report as an error
            await asyncio.gather(self._copy(reader, downstream), answers)
        self._open -= {writer, downstream}

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        try:
            while data := await reader.read(65536):
                if is_answer and self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
