"""Who is a rank, an agent or a shell in a tree of processes, and who gets a signal."""

import os
import signal

import pytest

from torchrun_runtime.launch import processes
from torchrun_runtime.launch.processes import Process, Running, agents, foremost, programs, ranks


class Tree:
    """Processes below the launcher, which is pid 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[Process] = []
        self.variables: dict[int, dict[str, str]] = {}
        self.signals: dict[int, dict[str, int]] = {}
        monkeypatch.setattr(
            processes, "variable", lambda pid, name: self.variables.get(pid, {}).get(name)
        )
        monkeypatch.setattr(
            processes,
            "_has",
            lambda pid, field, number: self.signals.get(pid, {}).get(field) == number,
        )
        monkeypatch.setattr(processes, "every", lambda: self.processes)

    def add(self, pid: int, parent: int, name: str = "python", **variables: str) -> Process:
        self.processes.append(Process(pid, parent, name, 0))
        self.variables[pid] = variables
        return self.processes[-1]

    def pids_to_signal(self, number: int = signal.SIGTERM) -> list[int]:
        return [process.pid for process in foremost(self.processes, number)]


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(monkeypatch)


def test_parents_come_before_children_and_other_processes_are_left_out(tree: Tree) -> None:
    for pid, parent in ((5, 3), (3, 2), (2, 1), (9, 8), (4, 2)):
        tree.add(pid, parent)
    assert [process.pid for process in processes.descendants(1)] == [2, 3, 4, 5]


def test_a_rank_is_the_topmost_process_with_its_number(tree: Tree) -> None:
    tree.add(2, 1)
    tree.add(3, 2, LOCAL_RANK="0")
    tree.add(4, 3, LOCAL_RANK="0")
    tree.add(5, 2, LOCAL_RANK="1")
    assert [rank.pid for rank in ranks(tree.processes)] == [3, 5]
    assert tree.pids_to_signal() == [3, 5]


def test_agents_are_above_ranks_and_no_shells(tree: Tree) -> None:
    tree.add(2, 1, "sh")
    tree.add(3, 2, "torchrun")
    tree.add(4, 3, "wrapper")
    tree.add(5, 4, LOCAL_RANK="0")
    tree.add(6, 4, LOCAL_RANK="1")
    tree.add(7, 2, "tee")
    assert [agent.name for agent in agents(tree.processes)] == ["wrapper", "torchrun"]


def test_without_ranks_the_command_gets_a_signal(tree: Tree) -> None:
    tree.add(2, 1)
    tree.add(3, 2)
    assert tree.pids_to_signal() == [2]


def test_a_shell_without_a_trap_passes_the_signal_to_its_children(tree: Tree) -> None:
    tree.add(2, 1, "bash")
    tree.add(3, 2, "sh")
    tree.add(4, 3)
    tree.add(5, 2, "tee")
    assert tree.pids_to_signal() == [4, 5]


def test_a_shell_without_children_gets_the_signal(tree: Tree) -> None:
    tree.add(2, 1, "bash")
    assert tree.pids_to_signal() == [2]


def test_a_shell_with_a_trap_gets_the_signal_with_its_foreground(tree: Tree) -> None:
    tree.add(2, 1, "bash")
    tree.add(3, 2)
    tree.add(4, 2)
    tree.signals = {2: {"SigCgt": signal.SIGTERM}, 3: {"SigIgn": signal.SIGQUIT}}
    assert tree.pids_to_signal() == [2, 4]
    assert tree.pids_to_signal(signal.SIGUSR1) == [3, 4]
    assert [p.pid for p in processes.trapping(tree.processes, signal.SIGTERM)] == [2]
    assert processes.trapping(tree.processes, signal.SIGUSR1) == []


def test_programs_are_all_but_shells_that_wait(tree: Tree) -> None:
    for pid, parent, name in ((2, 1, "bash"), (3, 2, "python"), (4, 3, "sh"), (5, 3, "python")):
        tree.add(pid, parent, name)
    assert [process.pid for process in programs(tree.processes)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("fields", "handles", "catches"),
    [
        ({"SigCgt": signal.SIGTERM}, True, True),
        ({"SigIgn": signal.SIGTERM}, False, True),
        ({"SigBlk": signal.SIGTERM}, False, False),
    ],
)
def test_a_signal_that_is_ignored_is_caught_but_not_handled(
    tree: Tree, fields: dict[str, int], handles: bool, catches: bool
) -> None:
    process = tree.add(2, 1)
    tree.signals[2] = fields
    assert processes.handles(process, signal.SIGTERM) == handles
    assert processes.catches(process, signal.SIGTERM) == catches


def test_the_running_ranks_are_known_by_their_numbers(tree: Tree) -> None:
    assert processes.running(1) == Running()
    tree.add(2, 1)
    tree.add(3, 2, LOCAL_RANK="0", RANK="4")
    tree.add(4, 2, LOCAL_RANK="1", RANK="x")
    tree.add(5, 3, RANK="7")
    pids = frozenset({2, 3, 4, 5})
    assert processes.running(1) == Running(pids, frozenset({None, 4}))


def test_without_torchrun_the_command_may_be_a_rank(tree: Tree) -> None:
    tree.add(2, 1, RANK="3")
    tree.add(3, 2, RANK="5")
    assert processes.running(1) == Running(frozenset({2, 3}), frozenset({None, 3}))


def test_the_signals_of_a_process_are_those_of_the_kernel() -> None:
    own = Process(os.getpid(), os.getppid(), "python", 0)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert processes.handles(own, signal.SIGUSR2)
        assert not processes.handles(own, signal.SIGUSR1)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not processes.handles(own, signal.SIGUSR2)
        assert processes.catches(own, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.catches(Process(2**22 + 1, 1, "gone", 0), signal.SIGUSR2)


def test_the_environment_and_state_of_a_process_are_those_of_the_kernel() -> None:
    assert processes.variable(os.getpid(), "PATH") == os.environ["PATH"]
    assert processes.variable(os.getpid(), "PAT") is None
    assert processes.variable(2**22 + 1, "PATH") is None
    assert processes.state(os.getpid()) == "R (running)"
    assert processes.state(2**22 + 1) == "gone"
