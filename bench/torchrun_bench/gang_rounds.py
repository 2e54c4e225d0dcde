"""A restart in the same pods as the launchers of a gang see it: messages, bytes, CPU, seconds.

The leader is that of the launcher, in this process. Another process has the members of all other
nodes. Their commands do nothing, so the figures are those of the protocol: from the report of a
failed rank until the last node has started the next round.

Usage: python -m torchrun_bench.gang_rounds PORT NODES    the members
"""

import asyncio
import secrets
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing

from torchrun_bench.options import Options
from torchrun_bench.processes import PYTHON, compiled_environment, free_port
from torchrun_bench.report import Row, row, say
from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang.greeting import proof
from torchrun_runtime.launch.gang.leader import GangLeader
from torchrun_runtime.launch.gang.member import GangMember
from torchrun_runtime.launch.gang.messages import (
    RUNNING,
    EndGang,
    GangOrder,
    MemberState,
    StopRound,
    decode,
    decode_order,
    encode,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RoundFailure, Verdict
from torchrun_runtime.launch.gang.server import GangServer
from torchrun_runtime.launch.gang.stopping import Agreement

KEY = "bench"
SECONDS = 120.0  # for the members to connect, and for a restart
CAUSE = Cause(1, 0, None, "Exception", "RuntimeError: of the benchmark", "2026-01-01T00:00:00Z")


class _AlwaysRestart:
    """Follows each failed round by another one."""

    is_off = False

    def judge(self, failed: RoundFailure, restarts: int) -> Verdict:
        """Restart."""
        return Verdict(restart=True)


class _MeasuredLeader(GangLeader):
    """Counts what arrives, and notices when all nodes run a round. Lives in the server's thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size, _AlwaysRestart())
        self.size = size
        self.messages = self.bytes = 0
        self._running: set[int] = set()
        self.all_run = threading.Event()
        self.seconds = self.cpu = 0.0  # when the last node started the present round

    def note(self, index: int, state: MemberState) -> None:
        """Note the state of a member; that of node 0 is not sent."""
        if index:
            self.messages += 1
            self.bytes += len(encode_state(state))
        super().note(index, state)
        if state.state != RUNNING:
            self._running.discard(index)
            return
        self._running.add(index)
        if len(self._running) == self.size:
            self.seconds, self.cpu = time.monotonic(), time.thread_time()
            self.all_run.set()


class _Gang:
    """The leader with its server and its own node."""

    def __init__(self, port: int, size: int) -> None:
        self.leader = _MeasuredLeader(size)
        self._own = GangMember()
        self.server = GangServer(port, size, KEY, self.leader, self._follow)
        self.server.call(lambda leader, now: leader.open_gate(now))
        self._report()

    def close(self) -> None:
        """End the gang: its members leave."""
        self.leader.order = EndGang()
        self.server.call(GangLeader.tick)
        self.server.close()

    def await_all(self) -> None:
        """Return once all nodes run."""
        if not self.leader.all_run.wait(SECONDS):
            raise TimeoutError("the nodes have not started")
        self.leader.all_run.clear()

    def fail(self) -> "_Restart":
        """Let the rank of node 0 fail, and return once all nodes run again."""
        leader, started = self.leader, threading.Event()
        before: list[float] = []

        def begin(_: GangLeader, now: float) -> None:
            leader.messages = leader.bytes = 0
            before.extend((time.monotonic(), time.thread_time()))
            self._own.end(CAUSE, None, stopped=False)
            leader.receive(0, self._own.state, now)
            started.set()

        self.server.call(begin)
        started.wait(SECONDS)
        self.await_all()
        return _Restart(
            leader.messages, leader.bytes, leader.seconds - before[0], leader.cpu - before[1]
        )

    def _follow(self, order: GangOrder | Agreement) -> None:
        """Follow an order on node 0, in the thread of the server; no rank agrees on a stop."""
        if isinstance(order, Agreement):
            return
        others = self.leader.size - 1
        self.leader.messages += others
        self.leader.bytes += others * len(encode_order(order))
        if self._own.follow(order) is not None:
            self._report()

    def _report(self) -> None:
        state = self._own.state
        self.server.call(lambda leader, now: leader.receive(0, state, now))


class _Restart:
    """The figures of one restart."""

    def __init__(self, messages: int, size: int, seconds: float, cpu: float) -> None:
        self.messages, self.bytes, self.seconds, self.cpu = messages, size, seconds, cpu


def gang_rounds(options: Options) -> list[Row]:
    """Restarts of gangs of these sizes."""
    rows: list[Row] = []
    for nodes in options.protocol:
        say(f"{nodes} nodes: {options.protocol_restarts} restarts")
        restarts = measure(nodes, options.protocol_restarts)
        median = {
            name: statistics.median(getattr(restart, name) for restart in restarts)
            for name in ("messages", "bytes", "seconds", "cpu")
        }
        rows += [
            row(f"{nodes} nodes: messages of a restart", "", median["messages"]),
            row(f"{nodes} nodes: bytes of a restart", "KB", median["bytes"] / 1000),
            row(f"{nodes} nodes: CPU of the leader", "ms", median["cpu"] * 1000),
            row(f"{nodes} nodes: failure to the last start", "ms", median["seconds"] * 1000),
        ]
    return rows


def measure(nodes: int, restarts: int) -> list[_Restart]:
    """Restart a gang so often."""
    port = free_port()
    with closing(_Gang(port, nodes)) as gang:
        members = subprocess.Popen(
            [PYTHON, "-m", "torchrun_bench.gang_rounds", str(port), str(nodes)],
            env=compiled_environment(),
        )
        try:
            gang.await_all()
            return [gang.fail() for _ in range(restarts)]
        finally:
            members.kill()
            members.wait()


async def _member(port: int, index: int) -> None:
    """One node without a command."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    own = secrets.token_hex(16)
    nonces = (str(decode(await reader.readline())["nonce"]), own)
    claim = proof(KEY, "member", nonces, index)
    hello = {"index": index, "nonce": own, "proof": claim, "time": time.time()}
    writer.write(encode({**hello, "instance": str(index)}))
    await reader.readline()
    member = GangMember()
    writer.write(encode_state(member.state))
    while line := await reader.readline():
        order, before = decode_order(line), member.state
        if isinstance(order, StopRound) and before.state == RUNNING and member.stop(order):
            member.end(None, None, stopped=True)
        else:
            member.follow(order)
        if member.state != before:
            writer.write(encode_state(member.state))


async def _members(port: int, nodes: int) -> None:
    await asyncio.gather(*(_member(port, index) for index in range(1, nodes)))


if __name__ == "__main__":
    asyncio.run(_members(*map(int, sys.argv[1:])))
