"""Each recipe under a real torchrun: its ranks are killed, and the next run continues."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from recipes import environment
from torchrun_runtime.launch.processes import descendants, send

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
RANK_MODULES = ROOT / "runtime" / "torchrun_runtime" / "launch" / "rank"
NAMES = ("ddp", "memory", "fsdp2", "lightning", "accelerate", "transformers", "deepspeed")
SHUFFLES = ("lightning",)  # in another order after a restart
MANY = 10**6  # steps; no run gets so far before it is killed
SAVE_EVERY = 16
MORE = 5  # steps after the one at which the first run was killed
# Without a line end: the lines of two ranks may share a line.
STEP = re.compile(r"\[rank (\d+)\] step (\d+)(?: loss ([\d.]+))?")
RESUMED = re.compile(r"\[rank (\d+)\] resumed after step (\d+)")
ONE_NODE = (2,)
TWO_NODES = (1, 1)

pytestmark = [
    pytest.mark.skipif(not environment.is_built(), reason="`make recipes` builds their Python"),
    pytest.mark.timeout(900),
]


def pod_environment(
    nodes: tuple[int, ...], node: int, port: int, folder: Path, memory: Path
) -> Mapping[str, str]:
    """What torchrun and the recipe read in the pod of a node; `nodes` are the ranks of each."""
    python = environment.interpreter()
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(RANK_MODULES),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions"),  # DeepSpeed compiles one
        "TORCHRUN_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "MEMORY_DIR": str(memory / str(node)),
        "TORCHRUN_BACKEND": "gloo",
        "TORCHRUN_LAUNCH_REPORTS": str(folder / f"reports-{node}"),
        "PET_NNODES": str(len(nodes)),
        "PET_NPROC_PER_NODE": str(nodes[node]),
        "PET_NODE_RANK": str(node),
        "PET_RDZV_BACKEND": "static" if len(nodes) == 1 else "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": f"recipe-{port}",
        "PET_MAX_RESTARTS": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        # In a cluster the pods have DNS names.
        "PET_LOCAL_ADDR": "127.0.0.1",
    }


@contextmanager
def started(
    name: str, folder: Path, nodes: tuple[int, ...], steps: int, memory: Path | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """One torchrun for each node, in new pods, or in those with this memory.

    All of their processes are killed at the end.
    """
    (folder / "checkpoints").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    memory = memory or folder / f"memory-{port}"
    command = [str(environment.interpreter()), "-m", "torch.distributed.run"]
    command += [str(RECIPES / f"train_{name}.py"), "--steps", str(steps)]
    command += ["--save-every", str(SAVE_EVERY)]
    agents: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for node in range(len(nodes)):
            (folder / f"reports-{node}").mkdir(exist_ok=True)
            agent = subprocess.Popen(
                command,
                env=pod_environment(nodes, node, port, folder, memory),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(agent)
            stack.callback(kill, agent)
            agents.append(agent)
        yield agents


def kill(agent: subprocess.Popen[str]) -> None:
    """SIGKILL to torchrun and its ranks, which have sessions of their own."""
    ranks = descendants(agent.pid)
    agent.kill()
    send(ranks, signal.SIGKILL)


def killed_after(name: str, folder: Path, step: int, memory: Path | None = None) -> str:
    """The output of a run on one node that gets SIGKILL when a rank has done the step."""
    with started(name, folder, ONE_NODE, MANY, memory) as (agent,):
        assert agent.stdout
        lines = []
        for line in agent.stdout:
            lines.append(line)
            if re.search(rf"step {step}\b", line):
                kill(agent)
                break
        else:
            pytest.fail("torchrun ended by itself:\n" + "".join(lines))
        return "".join([*lines, *agent.stdout])


def finished(
    name: str, folder: Path, nodes: tuple[int, ...], steps: int, memory: Path | None = None
) -> str:
    """The output of a run to its end."""
    with started(name, folder, nodes, steps, memory) as agents:
        outputs = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
    return "".join(outputs)


def losses(output: str, rank: int) -> dict[int, str]:
    return {int(step): loss for found, step, loss in STEP.findall(output) if int(found) == rank}


def resumed_steps(output: str) -> dict[int, int]:
    return {int(rank): int(step) for rank, step in RESUMED.findall(output)}


def check_continues(after: str, ranks: int, last: int) -> None:
    """The second run starts at a checkpoint of the first one and computes the same."""
    steps = resumed_steps(after)
    assert steps.keys() == set(range(ranks))
    (start,) = set(steps.values())
    assert SAVE_EVERY <= start <= last
    assert start % SAVE_EVERY == 0, "not the step of a checkpoint"
    for rank in range(ranks):
        assert sorted(losses(after, rank)) == list(range(start + 1, last + MORE + 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_continues_from_its_checkpoint_after_sigkill(name: str, tmp_path: Path) -> None:
    before = killed_after(name, tmp_path, step=SAVE_EVERY + 4)
    assert resumed_steps(before) == {}
    last = max(losses(before, 0))
    after = finished(name, tmp_path, ONE_NODE, last + MORE)
    check_continues(after, 2, last)
    if name not in SHUFFLES:
        again = losses(after, 0)
        for step, loss in losses(before, 0).items():
            assert again.get(step, loss) == loss, f"step {step}"
    progress = json.loads((tmp_path / "reports-0" / "progress").read_text())
    assert progress["step"] == progress["totalSteps"] == last + MORE


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_nodes_continue_what_one_node_has_saved(name: str, tmp_path: Path) -> None:
    last = SAVE_EVERY + 4
    finished(name, tmp_path, ONE_NODE, last)
    after = finished(name, tmp_path, TWO_NODES, last + MORE)
    assert resumed_steps(after) == {0: last, 1: last}
    for rank in (0, 1):
        assert sorted(losses(after, rank)) == list(range(last + 1, last + MORE + 1))


def test_ranks_that_restart_in_their_pod_continue_from_its_memory(tmp_path: Path) -> None:
    before = killed_after("memory", tmp_path, SAVE_EVERY - 2, tmp_path / "shm")
    last = max(losses(before, 0))
    assert not (tmp_path / "checkpoints" / "memory.pt").exists() or last >= SAVE_EVERY
    after = finished("memory", tmp_path, ONE_NODE, last + MORE, tmp_path / "shm")
    (start,) = set(resumed_steps(after).values())
    assert f"after step {start} from {tmp_path / 'shm'}" in after
    assert start >= last - 5, "the last checkpoint in memory"
    assert sorted(losses(after, 0)) == list(range(start + 1, last + MORE + 1))
    assert losses(before, 0).items() <= (losses(before, 0) | losses(after, 0)).items()


@pytest.mark.parametrize("torn", [False, True], ids=["all", "one node without the newest"])
def test_nodes_continue_from_what_all_have_in_memory(tmp_path: Path, torn: bool) -> None:
    memory = tmp_path / "shm"
    finished("memory", tmp_path, TWO_NODES, 11, memory)
    assert [sorted(p.stem for p in (memory / node).rglob("*.pt")) for node in "01"] == [
        ["10", "5"]
    ] * 2
    (tmp_path / "checkpoints" / "memory.pt").unlink()
    if torn:
        (memory / "1" / "checkpoints" / "10.pt").unlink()
    after = finished("memory", tmp_path, TWO_NODES, 15, memory)
    assert resumed_steps(after) == dict.fromkeys((0, 1), 5 if torn else 10)


def test_fsdp2_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    finished("fsdp2", tmp_path, ONE_NODE, SAVE_EVERY)
    after = finished("fsdp2", tmp_path, (1,), SAVE_EVERY + MORE)
    assert resumed_steps(after) == {0: SAVE_EVERY}
    assert sorted(losses(after, 0)) == list(range(SAVE_EVERY + 1, SAVE_EVERY + MORE + 1))


def test_a_checkpoint_that_was_not_completed_is_ignored(tmp_path: Path) -> None:
    finished("fsdp2", tmp_path, (1,), SAVE_EVERY)
    partial = tmp_path / "checkpoints" / "fsdp2" / f"step-{SAVE_EVERY * 2:08d}"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    after = finished("fsdp2", tmp_path, (1,), SAVE_EVERY + MORE)
    assert resumed_steps(after) == {0: SAVE_EVERY}
