"""The leader's side of the connections: an asyncio server in a separate thread."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from contextlib import suppress
from typing import Callable

from ..cause import LaunchError
from ..connections import Port, listen, most_connections
from ..output import say
from ..threads import start_thread
from .connection import keep_alive
from .greeting import KnownLaunchers, is_proof, proof, skew_of, with_time_of_leader
from .leader import GangLeader
from .messages import (
    LONGEST_LINE,
    GangOrder,
    InvalidMessageError,
    decode,
    decode_state,
    encode,
    encode_order,
)
from .stopping import Agreement, decode_vote, encode_agreement

_TICK_SECONDS = 0.5
_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 0.5  # for the last order to arrive; a node without it ends a little later
_SPARE_CONNECTIONS = 256  # without a greeting, more than members


class GangServer:
    """Connects a GangLeader with the members of its gang.

    `leader` is only used in the thread of the server; `call` runs a function there. `ordered` is
    called there with each new order and agreement. Raises LaunchError (ChannelFailed) if the port
    is taken.
    """

    def __init__(
        self,
        port: int,
        size: int,
        key: str,
        leader: GangLeader,
        ordered: Callable[[GangOrder | Agreement], None],
    ) -> None:
        self.leader = leader
        self._size = size
        self._key = key
        self._ordered = ordered
        self._sent: GangOrder | None = None
        self._sent_agreement: Agreement | None = None
        self._decides = False  # soon
        self._writers: dict[int, asyncio.StreamWriter] = {}
        listener = _listen(port)
        self._loop = asyncio.new_event_loop()
        self._instance = secrets.token_hex(8)
        self._members = KnownLaunchers()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        most = most_connections(size + _SPARE_CONNECTIONS, size)
        self._port = Port(most, _HANDSHAKE_SECONDS, speaks_first=True)
        self._thread = start_thread(lambda: self._serve_until_end(listener))

    def call(self, function: Callable[[GangLeader, float], None]) -> None:
        """Run a function with the leader and the present time, and send the order if it is new."""

        def run() -> None:
            function(self.leader, time.monotonic())
            self._send_new_order()

        self._loop.call_soon_threadsafe(run)

    def close(self) -> None:
        """End once the members have closed, which have the last order; within _CLOSE_SECONDS."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(4 * _CLOSE_SECONDS)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _serve_until_end(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._run(listener))
        finally:
            self._loop.close()

    async def _run(self, listener: socket.socket) -> None:
        self._left = asyncio.Event()  # set whenever a member has left
        self._port.open(listener, self._protocol)
        while not self._ended.done():
            self._decide()
            await asyncio.wait([self._ended], timeout=_TICK_SECONDS)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_for_ends(), _CLOSE_SECONDS)
        self._port.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _protocol(self) -> asyncio.Protocol:
        reader = asyncio.StreamReader(LONGEST_LINE, self._loop)
        return asyncio.StreamReaderProtocol(reader, self._serve, self._loop)

    async def _wait_for_ends(self) -> None:
        """Return once the members have closed."""
        while self._writers:
            self._left.clear()
            await self._left.wait()

    def _decide_soon(self) -> None:
        """Decide once for all states that have arrived by now: a decision looks at all nodes."""
        if not self._decides:
            self._decides = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._decides = False
        self.leader.tick(time.monotonic())
        self._send_new_order()

    def _send_new_order(self) -> None:
        agreement = self.leader.agreement
        if agreement is not None and agreement != self._sent_agreement:
            self._sent_agreement = agreement
            self._send(agreement, encode_agreement(agreement))
        order = self.leader.order
        if order is not None and order != self._sent:
            self._sent = order
            self._send(order, encode_order(order))

    def _send(self, message: GangOrder | Agreement, line: bytes) -> None:
        for writer in self._writers.values():
            writer.write(line)
        self._ordered(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = -1
        try:
            node, launcher, skew = await self._greet(reader, writer)
            self._port.admit(writer.transport)
            # A launcher that refuses this leader closes the connection instead.
            state = await reader.readline()
            if state:
                self._join(node, launcher, writer)
                index = node
            while state and self._writers.get(index) is writer:
                vote = decode_vote(state)
                if vote is not None:
                    self.leader.note_vote(index, vote, time.monotonic())
                else:
                    self.leader.note(index, with_time_of_leader(decode_state(state), skew))
                self._decide_soon()
                state = await reader.readline()
        except (OSError, ValueError) as error:
            if index >= 0:
                say(f"lost the connection to node {index}: {error}")
        except asyncio.CancelledError:
            pass  # the server ends; asyncio of Python 3.11 would print a traceback
        finally:
            if self._writers.get(index) is writer:
                del self._writers[index]
                self.leader.lose(index, time.monotonic())
                self._left.set()
            writer.close()

    def _join(self, index: int, launcher: str, writer: asyncio.StreamWriter) -> None:
        """Let a launcher speak for its node. Raises InvalidMessageError if it may not."""
        self._members.check(index, launcher, has_started=self.leader.has_started)
        self._members.join(index, launcher)
        if index in self._writers:
            self._writers[index].close()  # it would get no order any more
        self._writers[index] = writer  # what the launcher before has sent arrives no more
        if self.leader.agreement is not None:
            writer.write(encode_agreement(self.leader.agreement))
        if self.leader.order is not None:
            writer.write(encode_order(self.leader.order))

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, str, float]:
        """Check that the other side belongs to this attempt.

        Its index, its launcher, and by how much its clock differs from that of this node.
        """
        keep_alive(writer.get_extra_info("socket"))
        own, sent = secrets.token_hex(16), time.time()
        writer.write(encode({"nonce": own}))
        hello = decode(await reader.readline())
        received = time.time()
        index, nonces = hello.get("index"), (own, str(hello.get("nonce")))
        if not isinstance(index, int) or not 0 < index < self._size:
            raise InvalidMessageError("not an index of this gang")
        if not is_proof(hello.get("proof"), proof(self._key, "member", nonces, index)):
            raise InvalidMessageError("not of this attempt")
        skew = skew_of(hello.get("time"), sent, received)
        launcher = str(hello.get("instance"))
        self._members.check(index, launcher, has_started=self.leader.has_started)
        claim = proof(self._key, "leader", nonces, index)
        writer.write(encode({"proof": claim, "instance": self._instance}))
        return index, launcher, skew


def _listen(port: int) -> socket.socket:
    """A listener on every address of the pod."""
    try:
        return listen("", port)
    except OSError as error:
        raise LaunchError(
            "ChannelFailed",
            f"The launcher cannot listen on port {port} for the other nodes of the gang:"
            f" {error.strerror}. Set spec.distributed.port to one that is free together with the 16"
            " ports after it, at most 65519.",
        ) from error
