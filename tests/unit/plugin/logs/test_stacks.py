"""`stacks`: equal stacks are printed once, and the rank that differs comes first."""

from kubectl_torchrun.logs.stacks import ProcessStack, lines_of

THREAD = "Thread 0x00007f{} (most recent call first):\n  File {}, line 7 in {}\n"


def stack(rank: int | None, function: str, *, is_rank: bool = True, text: str = "") -> ProcessStack:
    """One process. Each has other thread ids, as in reality."""
    number = rank or 0
    written = text or THREAD.format(f"{number:08x}", '"train.py"', function)
    return ProcessStack(
        100 + number, "python", written, "S (sleeping)", is_rank, rank, str(number // 2)
    )


def test_the_odd_rank_comes_first_and_equal_ones_once() -> None:
    stacks = [stack(rank, "save" if rank == 5 else "all_reduce") for rank in range(8)]
    lines = lines_of(stacks)
    assert lines == [
        "rank 5 (node 2, pid 105):",
        "  Thread (most recent call first):",
        '    File "train.py", line 7 in save',
        "ranks 0-4, 6-7 (nodes 0-3, 7 processes alike):",
        "  Thread (most recent call first):",
        '    File "train.py", line 7 in all_reduce',
    ]


def test_processes_below_the_ranks_follow() -> None:
    lines = lines_of([stack(0, "step"), *(stack(0, "load", is_rank=False) for _ in range(6))])
    assert [line for line in lines if not line.startswith(" ")] == [
        "rank 0 (node 0, pid 100):",
        "python[100], python[100], python[100], python[100] and 2 more processes, started by rank"
        " 0 (node 0, 6 processes alike):",
    ]


def test_a_process_without_a_stack_is_named_last() -> None:
    silent = ProcessStack(9, "nccl", "", "D (disk sleep)", True, 1, "0")
    assert lines_of([silent, stack(0, "step")])[-1].startswith(
        "rank 1 (node 0, pid 9): no stack, state D (disk sleep)"
    )


def test_commands_without_ranks_are_named_by_their_process() -> None:
    assert lines_of([stack(None, "step")])[0] == "python[100] (node 0, pid 100):"
