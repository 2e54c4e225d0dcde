"""The GPT example, trained by torchrun on the CPUs of this machine."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[3] / "examples" / "gpt" / "train.py"
PYTHON = os.environ.get("TORCHRUN_TEST_TORCH_PYTHON", "")
STEPS = 24
SMALL = ("--steps", str(STEPS), "--layers", "2", "--sample", "0", "--log-every", "1")
FINAL = re.compile(r"\[rank (\d+)\] finished \d+ steps, final loss (\S+)")
STEP = re.compile(r"\[rank (\d+)\] step (\d+)/\d+ loss (\S+) \(\d+ tokens/s\)")
LEFT = re.compile(r"\[rank (\d+)\] stopped after step (\d+)/")

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="TORCHRUN_TEST_TORCH_PYTHON names no Python interpreter that has torch"
)


def torchrun(*options: str) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", *options]


TWO_RANKS = torchrun("--nproc-per-node", "2")


@contextmanager
def started(
    launcher: Sequence[str], folder: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Run the example with `launcher` and its output in a pipe. Kills it at the end."""
    command = [*launcher, str(TRAIN), *SMALL, "--checkpoint-dir", str(folder), *options]
    environ = {**os.environ, "TORCHRUN_BACKEND": "gloo", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def trained(launcher: Sequence[str], folder: Path, *options: str) -> str:
    """Run the example to its end, and return the output."""
    with started(launcher, folder, *options) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the training ended without printing {text!r}")


def final_losses(output: str) -> dict[str, str]:
    return dict(FINAL.findall(output))


def steps_of(output: str, rank: str) -> list[int]:
    return [int(step) for number, step, _ in STEP.findall(output) if number == rank]


def test_the_loss_falls_for_any_number_of_ranks(tmp_path: Path) -> None:
    alone = trained([PYTHON], tmp_path / "alone")
    together = trained(TWO_RANKS, tmp_path / "together")

    losses = [float(loss) for rank, _, loss in STEP.findall(alone) if rank == "0"]
    assert losses[0] > 4.0
    assert losses[-1] < 3.2
    assert steps_of(together, "0") == steps_of(together, "1") == list(range(1, STEPS + 1))
    assert final_losses(together).keys() == {"0", "1"}
    for loss in final_losses(together).values():
        assert float(loss) == pytest.approx(losses[-1], abs=1e-3)


def test_sigterm_saves_and_the_next_start_continues(tmp_path: Path) -> None:
    whole = trained(TWO_RANKS, tmp_path / "whole")

    folder = tmp_path / "interrupted"
    with started(TWO_RANKS, folder, "--checkpoint-every", "1000") as process:
        read_until(process, "[rank 1] step 5/")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=120)
    left = dict(LEFT.findall(rest))
    assert left.keys() == {"0", "1"}
    assert left["0"] == left["1"]
    stopped = int(left["0"])
    assert 5 <= stopped < STEPS
    assert [path.name for path in folder.iterdir()] == [f"step-{stopped:08d}.pt"]

    (folder / "step-00000999.partial").write_bytes(b"torn by a crash")
    resumed = trained(TWO_RANKS, folder)
    assert steps_of(resumed, "0") == list(range(stopped + 1, STEPS + 1))
    assert final_losses(resumed) == final_losses(whole)


def test_sigterm_to_one_rank_stops_all_nodes_at_the_same_step(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    first = torchrun(*nodes, "--node-rank", "0")
    second = torchrun(*nodes, "--node-rank", "1")
    endless = ("--steps", "100000")
    with started(first, tmp_path, *endless) as master, started(second, tmp_path, *endless) as other:
        read_until(other, "[rank 1] step 3/")
        other.send_signal(signal.SIGTERM)
        texts = [node.communicate(timeout=120)[0] for node in (master, other)]
    left = dict(LEFT.findall("".join(texts)))
    assert left.keys() == {"0", "1"}
    assert left["0"] == left["1"]
    assert master.returncode != 0, "an unfinished run has no final loss"
    assert "exitcode: 143" in texts[0]


def test_a_finished_run_ends_at_once(tmp_path: Path) -> None:
    first = trained([PYTHON], tmp_path)
    again = trained([PYTHON], tmp_path)
    assert steps_of(again, "0") == []
    assert final_losses(again) == final_losses(first)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trained([PYTHON], tmp_path, "--steps", "1")
    with started([PYTHON], tmp_path, "--width", "32") as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert "use the same shape or another folder" in output
