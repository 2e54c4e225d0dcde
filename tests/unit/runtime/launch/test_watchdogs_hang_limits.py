"""When the hang watch begins, speaks and ends the ranks, by its own clock."""

import os
from pathlib import Path

import pytest

from torchrun_runtime.launch import watchdogs
from torchrun_runtime.launch.contract import NODE_RANK
from torchrun_runtime.launch.processes import Process
from torchrun_runtime.launch.watchdogs import HangWatchdog

SECONDS = 10.0


class Node:
    """A node whose ranks write and report when a test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.chunks = 0
        self.ranks: dict[int, str] = {}
        self.stacks: list[float] = []
        self.folder = folder
        monkeypatch.setattr(watchdogs.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdogs, "write_stacks", lambda _: self.stacks.append(self.now))
        monkeypatch.setattr(watchdogs, "descendants", self._descendants)
        monkeypatch.setattr(watchdogs, "variable", lambda pid, _: self.ranks[pid])
        monkeypatch.setattr(watchdogs, "ranks", lambda tree: tree)
        monkeypatch.setenv(NODE_RANK, "0")
        self.watch = HangWatchdog(SECONDS, str(folder), lambda: self.chunks)

    def _descendants(self, root: int) -> list[Process]:
        assert root == os.getpid()
        return [Process(pid, root, "python", 0) for pid in self.ranks]

    def beat(self, rank: int, time: int, text: str = ".") -> None:
        path = self.folder / f"beat.{rank}"
        path.write_text(text)
        os.utime(path, (time, time))

    def message_at(self, now: float) -> str:
        """The message of the request to stop at this time; "" without one."""
        self.now = now
        request = self.watch.check()
        return request.message if request else ""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_the_ranks_are_stopped_some_seconds_after_their_stacks(node: Node) -> None:
    node.chunks = 1
    assert node.message_at(100) == node.message_at(109.9) == ""
    assert node.stacks == []
    assert node.message_at(110) == node.message_at(114.9) == ""
    assert node.stacks == [110]
    assert node.message_at(115) == (
        "No progress report and no output for 15 s (hangTimeoutSeconds 10). The log of each node"
        " has the stacks of its ranks."
    )


def test_the_watch_begins_with_the_first_output(node: Node) -> None:
    assert node.message_at(150) == ""
    node.chunks = 1
    node.message_at(151)
    node.message_at(160.9)
    assert node.stacks == []
    node.message_at(161)
    assert node.stacks == [161]


def test_a_later_round_is_watched_without_a_sign(node: Node) -> None:
    node.chunks = 1
    node.message_at(120)
    assert node.watch.begun_after == 20
    node.chunks, node.ranks = 0, {7: "1"}
    node.watch = HangWatchdog(SECONDS, "", lambda: node.chunks, node.watch.begun_after)
    for now in (150, 159.9, 169.8):  # it begins twice as late as before, at 160
        node.message_at(now)
    assert node.stacks == []
    node.message_at(170)
    assert node.stacks == [170]


def test_output_before_the_first_look_counts_from_then(node: Node) -> None:
    node.chunks = 1
    node.message_at(105)
    node.message_at(114.9)
    assert node.stacks == []
    node.message_at(115)
    assert node.stacks == [115]


@pytest.mark.parametrize(
    ("node_rank", "ranks", "is_watched"),
    [
        ("0", {}, True),
        ("1", {}, False),
        ("1", {7: "0", 8: "1"}, True),
        ("0", {7: "2", 8: "3"}, False),
    ],
)
def test_output_begins_the_watch_beside_rank_0_only(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    node_rank: str,
    ranks: dict[int, str],
    is_watched: bool,
) -> None:
    monkeypatch.setenv(NODE_RANK, node_rank)
    node.chunks, node.ranks = 1, ranks
    node.message_at(101)
    node.message_at(150)
    assert bool(node.stacks) == is_watched


def test_a_rank_that_has_not_reported_yet_keeps_the_watch_from_its_begin(node: Node) -> None:
    node.chunks = 1
    node.beat(0, 1, "")
    node.message_at(101)
    node.message_at(150)
    assert node.stacks == []
    node.beat(0, 2)
    node.message_at(151)
    node.message_at(161)
    assert node.stacks == [161]


@pytest.mark.parametrize(
    ("beats", "text"),
    [
        ({0: 5}, ""),
        ({0: 5, 1: 4, 2: 6}, ". Rank 1 was the first without progress reports"),
    ],
)
def test_of_several_ranks_the_one_that_stopped_first_is_named(
    node: Node, beats: dict[int, int], text: str
) -> None:
    for rank, time in beats.items():
        node.beat(rank, time)
    for now in (100, 110, 115):
        message = node.message_at(now)
    assert f"(hangTimeoutSeconds 10){text}. The log" in message


def test_a_node_that_continues_is_watched_again(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    node.chunks = 1
    for now in (100, 110):
        node.message_at(now)
    node.chunks = 2
    assert node.message_at(116) == node.message_at(117) == ""
    assert capfd.readouterr().err.count("the ranks continue; this is not a hang") == 1
    node.message_at(126)
    assert node.stacks == [110, 126]


@pytest.mark.parametrize(("silence", "are_written"), [(4.9, False), (5.0, True)])
def test_a_stop_writes_the_stacks_of_a_silent_node(
    node: Node, silence: float, are_written: bool
) -> None:
    node.chunks = 1
    node.message_at(100)
    node.now += silence
    node.watch.on_stop(leaving=False)
    assert bool(node.stacks) == are_written


def test_a_stop_does_not_repeat_the_stacks(node: Node) -> None:
    node.chunks = 1
    for now in (100, 110):
        node.message_at(now)
    node.watch.on_stop(leaving=False)
    assert node.stacks == [110]


def test_other_files_are_no_heartbeats(node: Node, tmp_path: Path) -> None:
    (tmp_path / "progress").write_text("{}")
    node.chunks = 1
    for now in (100, 110):
        node.message_at(now)
    assert node.stacks == [110]


def test_a_node_whose_ranks_have_ended_waits_for_the_others(node: Node) -> None:
    node.ranks = {7: "1"}
    node.beat(1, 100)
    assert node.message_at(101) == ""
    node.ranks.clear()
    assert [node.message_at(float(now)) for now in (111, 116, 200, 300)] == [""] * 4
    assert node.stacks == []


def test_a_node_with_one_rank_left_may_hang(node: Node) -> None:
    node.ranks = {7: "0", 8: "1"}
    node.beat(0, 100)
    assert node.message_at(101) == ""
    del node.ranks[7]
    assert node.message_at(112) == ""
    assert node.message_at(118).startswith("No progress report")


def test_the_watch_pauses_while_someone_debugs_a_rank(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    is_debugged = False
    node.watch = HangWatchdog(
        SECONDS, str(node.folder), lambda: node.chunks, is_debugged=lambda: is_debugged
    )
    node.chunks = 1
    assert node.message_at(100) == node.message_at(110) == ""
    is_debugged = True
    assert node.message_at(111) == node.message_at(1000) == ""
    is_debugged = False
    assert node.message_at(1001) == node.message_at(1009) == ""
    assert node.stacks == [110]
    assert node.message_at(1011) == ""
    assert node.stacks == [110, 1011]
    assert node.message_at(1016).startswith("No progress report")
    assert capfd.readouterr().err.count("hang watch") == 2
