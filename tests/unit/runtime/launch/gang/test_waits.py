"""How a node waits for orders, and what its log says meanwhile."""

import socket
import threading
from contextlib import closing

import pytest

from ports import free_port
from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang import rounds
from torchrun_runtime.launch.gang.leader import Predecessor, Restarts
from torchrun_runtime.launch.gang.messages import (
    EndGang,
    MemberState,
    RoundCode,
    StartRound,
    StopRound,
)
from torchrun_runtime.launch.gang.policy import RestartLimits
from torchrun_runtime.launch.gang.rounds import GangNode, OrderInbox, OwnLink


class Observed(threading.Condition):
    """Says when a thread waits, and whether each wait has ended by a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.ends: list[bool] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.has_begun.set()
        self.ends.append(super().wait(timeout))
        return self.ends[-1]


def test_a_wait_ends_with_the_next_order() -> None:
    inbox = OrderInbox()
    inbox._changed = condition = Observed()

    def put() -> None:
        if condition.has_begun.wait(60):
            inbox.put(StartRound(0))

    leader = threading.Thread(target=put)
    leader.start()
    inbox.wait(None, 30)
    assert inbox.order == StartRound(0)
    leader.join()
    inbox.wait(None, 30)
    assert condition.ends == [True], "no wait for an order that is already there"


def link(size: int, inbox: OrderInbox | None = None, port: int = 0) -> OwnLink:
    port = port or (free_port() if size > 1 else 0)
    return OwnLink(GangNode(0, size, "", port, "key"), RestartLimits(), inbox or OrderInbox())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "node 0 of the gang"),
        (2, "nodes 0, 1 of the gang"),
        (8, "nodes 0, 1, 2, 3, 4, 5, 6, 7 of the gang"),
        (10, "nodes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of the gang"),
    ],
)
def test_the_leader_names_the_nodes_that_are_missing(size: int, text: str) -> None:
    with closing(link(size)) as own:
        assert own.describe_wait() == text


def test_without_a_missing_node_the_leader_waits_for_the_ranks_of_the_others() -> None:
    with closing(link(1)) as own:
        own.report(MemberState())
        assert own.describe_wait() == "the other nodes of the gang"


def test_time_passes_for_the_leader_of_a_single_node(monkeypatch: pytest.MonkeyPatch) -> None:
    now, inbox = 100.0, OrderInbox()
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now)
    failure = Cause(1, 0, None, "Exception", "ValueError: no", "")
    own = link(1, inbox)
    own.announce(RoundCode(), edit_wait=60)
    own.report(MemberState())
    assert inbox.order is None
    own.open_gate(Predecessor(restarts=2, first_round=4))
    assert inbox.order == StartRound(4, restarts=2)
    own.report(MemberState("failed", 4, failure))
    now = 159.0
    own.tick()
    assert inbox.order == StopRound(4, edit=True)
    now = 160.0
    own.tick()
    assert inbox.order == EndGang()
    assert (own.lost_seconds(), own.leader.restarts()) == (0, Restarts(2))


def test_the_port_of_a_leader_is_free_after_its_end() -> None:
    port = free_port()
    link(2, port=port).close()
    with socket.create_server(("", port)):
        pass


def test_a_wait_writes_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now)
    with closing(link(1)) as own:
        line = rounds._WaitLine()
        waits = [(109.9, ""), (110, ""), (119, ""), (120, "")]
        edits = [(now, "the next edit") for now in (125, 126, 134, 135, 140, 145)]
        for now, edit in waits + edits:  # noqa: B007 read by the clock
            line.write(own, edit)
    assert [text.partition(": ")[2] for text in capfd.readouterr().err.splitlines()] == [
        "waiting for node 0 of the gang (10 s)",
        "waiting for node 0 of the gang (20 s)",
        "development mode: the pod waits for the next edit",
        "waiting for the next edit: kubectl torchrun sync (10 s)",
        "waiting for the next edit: kubectl torchrun sync (20 s)",
    ]
