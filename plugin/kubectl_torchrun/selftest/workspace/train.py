"""What the ranks of a self-test run, with torch alone: python train.py CHECK.

Each fact is a line of JSON after a mark, which the plugin reads in the log (selftest/facts.py).
The first start trains, saves once and breaks. Later ones resume, and end after a few steps.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
import torchrun_progress  # type: ignore[import-not-found]

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
ATTEMPT, ROUND = (int(os.environ.get(f"TORCHRUN_{name}") or 0) for name in ("ATTEMPT", "ROUND"))
IS_FIRST = (ATTEMPT, ROUND) == (0, 0)
ODD = RANK == WORLD - 1  # the rank that breaks
STEP_SECONDS = 0.05
SAVED_STEP, FAULT_STEP = 20, 120  # the launchers have five seconds to report the checkpoint
LAST_STEPS = 20  # after a resume
SMALLEST, FACTOR = 1 << 10, 4  # bytes
LARGEST = {"cuda": 1 << 30, "cpu": 1 << 26}
SIZE_SECONDS, LONGEST_SECONDS = 1.0, 8.0  # of all repeats, and of one all-reduce
BALLAST = 1 << 30  # bytes of GPU memory that a rank holds when one is killed


def print_fact(kind: str, **facts: object) -> None:
    """Print a fact in one write, because the ranks of a node share a pipe."""
    where = {"rank": RANK, "attempt": ATTEMPT, "round": ROUND, "time": time.time()}
    line = json.dumps({"kind": kind, **where, **facts})
    os.write(1, f"torchrun-selftest: {line}\n".encode())


def driver() -> str | None:
    """The version of the NVIDIA driver of this machine."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found and found[1]


def print_versions(device: torch.device) -> None:
    """Versions and hardware, as rank 0 sees them."""
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if on_gpu else None
    print_fact(
        "versions",
        world=WORLD,
        backend=dist.get_backend(),
        gpu=gpu and gpu.name,
        gpu_bytes=gpu and gpu.total_memory,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        driver=driver(),
    )


def wait_for(device: torch.device) -> None:
    """Wait for the work that the GPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agree(value: float, device: torch.device, how: dist.ReduceOp.RedOpType) -> float:
    """The largest or smallest value of all ranks."""
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=how)
    return float(shared.item())


def time_all_reduce(tensor: torch.Tensor, repeats: int) -> float:
    """Seconds of one all-reduce, on the slowest rank."""
    wait_for(tensor.device)
    since = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    wait_for(tensor.device)
    seconds = (time.perf_counter() - since) / repeats
    return agree(seconds, tensor.device, dist.ReduceOp.MAX)


def measure_bandwidth(device: torch.device) -> None:
    """All-reduce tensors of growing size, until one takes too long."""
    size, seconds = SMALLEST, 0.0
    while size <= LARGEST[device.type] and seconds < LONGEST_SECONDS:
        tensor = torch.full((size // 4,), float(RANK + 1), device=device)
        dist.all_reduce(tensor)
        is_right = bool((tensor == WORLD * (WORLD + 1) // 2).all())
        all_right = agree(float(is_right), device, dist.ReduceOp.MIN) == 1
        tensor.zero_()
        repeats = int(SIZE_SECONDS / max(time_all_reduce(tensor, 1), 1e-6))
        seconds = time_all_reduce(tensor, min(max(repeats, 1), 200))
        if RANK == 0:
            print_fact("bandwidth", bytes=size, seconds=seconds, correct=all_right)
        size *= FACTOR


def save(step: int) -> None:
    """Save on each node, because the storage may be local. Without storage a URL has the step."""
    folder = os.environ.get("TORCHRUN_CHECKPOINT_DIR")
    path = f"selftest://step-{step}"
    if folder:
        name = f"selftest-{os.environ.get('TORCHRUN_JOB_NAME', '')}-{step}"
        path = os.path.join(folder, name)
        if LOCAL_RANK == 0:
            partial = f"{path}.{RANK}"
            Path(partial).write_text(str(step))
            os.replace(partial, path)
    dist.barrier()
    torchrun_progress.checkpoint(step, path)
    if RANK == 0:
        print_fact("saved", step=step, files=bool(folder))


def check_saved(step: int, path: str) -> None:
    """End the rank if the checkpoint is a file that has another step than was reported."""
    if "://" not in path and int(Path(path).read_text()) != step:
        sys.exit("the checkpoint has another step than the one that was reported")


def stand_still() -> None:
    """Hang, in a function whose name the stacks show."""
    while True:
        time.sleep(3600)


def break_down(check: str) -> None:
    """What the check is about. A deleted pod and a suspension come from the plugin."""
    if check in ("delete", "stop") and RANK == 0:
        print_fact("ready")
    if check in ("kill", "hang") and ODD:
        print_fact("breaks")
        if check == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        stand_still()


def train(check: str, device: torch.device) -> None:
    """Train until the check has broken the first start, or for a few steps after it."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else None
    last = torchrun_progress.resume()
    if last:
        check_saved(last.step, last.path)
    step = start = last.step if last else 0
    print_fact("start", step=step, free=free)
    held = BALLAST if on_gpu and check == "kill" else 0
    ballast = torch.empty(held, dtype=torch.uint8, device=device)
    while IS_FIRST or step < start + LAST_STEPS:
        ones = torch.ones(1024, device=device)
        dist.all_reduce(ones)
        if int(ones[0].item()) != WORLD:
            sys.exit("the sum of all ranks is wrong")
        time.sleep(STEP_SECONDS)
        step += 1
        if step == start + 1:
            print_fact("step", step=step)
        torchrun_progress.report(step=step)
        if check == "stop" and torchrun_progress.stopping() is not None:
            save(step)
            print_fact("stopped", step=step)
            return
        if IS_FIRST and step == SAVED_STEP and check != "stop":
            save(step)
        if IS_FIRST and step == FAULT_STEP:
            break_down(check)
    del ballast
    dist.barrier()  # all ranks have read it, and storage that jobs share keeps nothing of this one
    if last and "://" not in last.path:
        Path(last.path).unlink(missing_ok=True)


def main() -> None:
    """Join the other ranks and run the check."""
    check = sys.argv[1]
    backend = os.environ.get("TORCHRUN_BACKEND") or (
        "nccl" if torch.cuda.is_available() else "gloo"
    )
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=3))
    if RANK == 0:
        print_versions(device)
    if check == "bandwidth":
        print_fact("start", step=0)
        measure_bandwidth(device)
    else:
        train(check, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
