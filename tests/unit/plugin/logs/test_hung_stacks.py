"""`why` of a hung gang: the stacks of the logs of all nodes, folded."""

import pytest

from kubectl_torchrun.logs.hung_stacks import stacks_in

from ..laptop import Laptop

HUNG = """\
step 1
torchrun-launch: no progress report and no output for 30 s (hangTimeoutSeconds 30); the stacks of the ranks follow
torchrun-launch: stack of python3[{pid}] of rank {rank}:
Thread 0x00007f00{pid:08x} (most recent call first):
  File "/app/train.py", line 7 in load
  File "/app/train.py", line 9 in <module>
torchrun-launch: the ranks continue; this is not a hang
step 2
torchrun-launch: stack of python3[{pid}] of rank {rank}:
Thread 0x00007f00{pid:08x} (most recent call first):
  File "/app/train.py", line 20 in {function}

Current thread 0x00007f01{pid:08x} (most recent call first):
  File "/app/train.py", line 30 in <module>
torchrun-launch: stack of python3[{child}] of rank {rank}:
Thread 0x00007f00{child:08x} (most recent call first):
  File "/app/data.py", line 5 in worker
torchrun-launch: no stack of tail[7{pid}] of rank {rank}, its state is S (sleeping): it is not Python
torchrun-launch: killing the command: No progress report
"""


def log(rank: int, function: str) -> str:
    return HUNG.format(rank=rank, pid=100 + rank, child=200 + rank, function=function)


def test_only_the_newest_stack_of_a_process_counts() -> None:
    stacks = stacks_in(log(3, "all_reduce").encode().splitlines(), "1")
    assert [(s.pid, s.rank, s.is_rank, s.node) for s in stacks] == [
        (103, 3, True, "1"),
        (203, 3, False, "1"),
        (7103, 3, False, "1"),
    ]
    assert "in all_reduce" in stacks[0].stack
    assert "line 30 in <module>" in stacks[0].stack
    assert "in load" not in stacks[0].stack
    assert (stacks[2].stack, stacks[2].state) == ("", "S (sleeping)")


@pytest.mark.long
def test_why_shows_the_odd_rank_of_a_hung_gang_first(laptop: Laptop) -> None:
    failure = {"message": "pod run-r0-1: No progress report", "reason": "Hung"}
    laptop.job("run", status={"phase": "Failed", "reason": "Hung", "lastFailure": failure})
    for node in range(3):
        laptop.worker("run", node)
        function = "read_shard" if node == 1 else "all_reduce"
        laptop.server.logs[f"run-r0-{node}"] = [log(node, function)]
    out = laptop.run("why", "run").stdout
    first, second = out.index("rank 1 (node 1, pid 101):"), out.index("ranks 0, 2 (nodes 0, 2, 2 ")
    assert out.index("when they hung, the odd one first:") < first < second
    assert "in read_shard" in out[first:second]
    laptop.server.logs.clear()
    for node in range(3):
        laptop.server.delete("pods", f"run-r0-{node}")
    assert "may have the stacks: kubectl torchrun logs run --attempt 0" in (
        laptop.run("why", "run").stdout
    )
