"""A member's side of the connection to the leader: a thread that connects again after each loss."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress
from time import time as wall_time
from typing import BinaryIO, Protocol

from ..cause import LaunchError
from ..threads import start_thread
from .greeting import check_leader, is_proof, proof
from .leader import GangLeader
from .messages import (
    LONGEST_LINE,
    GangOrder,
    InvalidMessageError,
    MemberState,
    decode,
    decode_order,
    encode,
    encode_state,
)
from .stopping import Agreement, Vote, decode_agreement, encode_vote

_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.5, 3.0
_TIMEOUT = 10.0  # of the connect and of the handshake
_REACH_SECONDS = 300.0


class Inbox(Protocol):
    """Where the orders of the leader go, and what the gang agrees on."""

    def put(self, message: GangOrder | Agreement | None) -> None:
        """Replace the order or the agreement; None removes both."""


class LeaderConnection:
    """Reports the state of this member, and puts each order of the leader into the inbox."""

    leader: GangLeader | None = None  # it is of another node

    def __init__(
        self,
        host: str,
        port: int,
        index: int,
        key: str,
        inbox: Inbox,
        reach_wait: float = _REACH_SECONDS,
    ) -> None:
        self._address = host, port
        self._index = index
        self._key = key
        self._inbox = inbox
        self._state = MemberState()
        self._vote: Vote | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()  # of the state and the socket
        self._closed = threading.Event()
        self._lost_at: float | None = time.monotonic()
        self._error = ""
        self._reach_wait = reach_wait
        self._unreachable_since: float | None = None
        self._instance = secrets.token_hex(8)
        self._leader: str | None = None  # the last one that this node was connected to
        start_thread(self._run)

    def report(self, state: MemberState) -> None:
        """Send the state, now or with the next connection."""
        with self._lock:
            self._state = state
            self._send(encode_state(state))

    def vote(self, vote: Vote) -> None:
        """Send the vote on a planned stop, now or with the next connection."""
        with self._lock:
            self._vote = vote
            self._send(encode_vote(vote))

    def lost_seconds(self) -> float:
        """For how long there has been no connection; 0 with one."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

    def describe_wait(self) -> str:
        """What this node waits for, for its log."""
        host, port = self._address
        if self._lost_at is None or not self._error:
            return "the other nodes of the gang"
        return f"node 0 of the gang at {host}:{port}: {self._error}"

    def check_reachable(self) -> None:
        """Raise LaunchError (ChannelFailed) if the leader cannot be reached for too long.

        Its pod may have no address yet, or no process that listens: these waits have no limit.
        """
        since = self._unreachable_since
        if since is None or time.monotonic() - since < self._reach_wait:
            return
        host, port = self._address
        raise LaunchError(
            "ChannelFailed",
            f"The launcher cannot reach node 0 of the gang at {host}:{port}: {self._error}. Allow"
            " this port between the pods of the job in network policies and firewalls.",
        )

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, line: bytes) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the reader notices the loss too
                self._socket.sendall(line)

    def _run(self) -> None:
        pause = _RETRY_SECONDS
        while not self._closed.is_set():
            try:
                self._talk()
                self._error = "the connection was closed"
            except (OSError, ValueError) as error:
                self._error = str(error)
                self._note_reach(error)
            if self._lost_at is None:
                self._lost_at, pause = time.monotonic(), _RETRY_SECONDS
            self._closed.wait(pause)
            pause = min(pause * 1.5, _LONGEST_RETRY_SECONDS)

    def _note_reach(self, error: Exception) -> None:
        """Note since when the network does not reach the leader, by the error of a connection."""
        waits = isinstance(error, (ConnectionRefusedError, socket.gaierror))
        if waits or not isinstance(error, OSError):
            self._unreachable_since = None
        elif self._unreachable_since is None:
            self._unreachable_since = time.monotonic()

    def _talk(self) -> None:
        """Connect, and read orders to the end of the connection. Raises OSError, ValueError."""
        connection = socket.create_connection(self._address, _TIMEOUT)
        self._unreachable_since = None
        with connection, connection.makefile("rb") as lines:
            leader = self._greet(connection, lines)
            connection.settimeout(None)
            with self._lock:
                if self._leader not in (None, leader):
                    self._inbox.put(None)  # the order of the leader before
                self._leader, self._socket = leader, connection
                self._send(encode_state(self._state))
                if self._vote is not None:
                    self._send(encode_vote(self._vote))
            self._lost_at = None
            try:
                while not self._closed.is_set() and (line := lines.readline(LONGEST_LINE)):
                    self._inbox.put(decode_agreement(line) or decode_order(line))
            finally:
                with self._lock:
                    self._socket = None

    def _greet(self, connection: socket.socket, lines: BinaryIO) -> str:
        """Prove to be of this attempt, and check that the leader is. Raises OSError, ValueError."""
        keep_alive(connection)
        own = secrets.token_hex(16)
        nonces = (str(decode(lines.readline(LONGEST_LINE)).get("nonce")), own)
        claim = proof(self._key, "member", nonces, self._index)
        hello = {"index": self._index, "nonce": own, "proof": claim, "time": wall_time()}
        connection.sendall(encode({**hello, "instance": self._instance}))
        answer = decode(lines.readline(LONGEST_LINE))
        expected = proof(self._key, "leader", nonces, self._index)
        if not is_proof(answer.get("proof"), expected):
            raise InvalidMessageError("it is not of this attempt")
        leader = str(answer.get("instance"))
        check_leader(self._state, self._leader, leader)
        return leader


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice within about 15 s that the other machine is gone."""
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
