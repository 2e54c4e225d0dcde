"""The launcher, CUDA and NCCL on one GPU, without a cluster. `record_property` adds to `--table`.

The Python of the ranks needs torch with CUDA: TORCHRUN_TEST_TORCH_PYTHON, or the one that runs
pytest. Two ranks on one GPU use gloo, because NCCL refuses to share a GPU.
"""

import json
import os
import re
import statistics
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu.machine import PYTHON, missing
from torchrun_runtime.launch.network import TransportFinder
from unit.runtime.launching import (
    FOLDER,
    SECONDS,
    Launcher,
    Result,
    launcher_with_training,
    torchrun_environment,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
Note = Callable[[str, object], None]
# How the driver's libraries and the GPU are found.
_PASSED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")

TRAIN = """
    import ctypes, os, signal, sys, time
    import torch, torch.distributed as dist
    import torchrun_progress
    torch.cuda.set_device(0)
    dist.init_process_group(os.environ["BACKEND"])
    rank = dist.get_rank()
    ones = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    exec(os.environ["CODE"])
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    yield from launcher_with_training(PYTHON, tmp_path, TRAIN)


def variables(backend: str, ranks: int, code: str, **more: str) -> "dict[str, str]":
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    own = {**passed, "BACKEND": backend, "CODE": textwrap.dedent(code), **more}
    return torchrun_environment(PYTHON, ranks, NODE_RANK="0", **own)


def run(launcher: Launcher, backend: str, ranks: int, code: str, **more: str) -> Result:
    return launcher.run(["python", "train.py"], **variables(backend, ranks, code, **more))


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_ranks_reduce_tensors_of_the_gpu(
    launcher: Launcher, record_property: Note, backend: str, ranks: int
) -> None:
    code = "print('sum', int(ones[0]), 'log', os.environ.get('NCCL_DEBUG'), flush=True)"
    result = run(launcher, backend, ranks, code)
    assert (result.exit_code, result.message) == (0, {}), result.err
    # Nothing asks NCCL for its log: a single node has no network.
    assert result.out.splitlines() == [f"sum {ranks} log None"] * ranks
    record_property(f"all_reduce, {backend}", f"{ranks} ranks: the sum is {ranks}")


# A kernel that the driver compiles. It writes to address 16.
ILLEGAL = '''
ptx = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry bad() { .reg .b64 %a; .reg .b32 %v;
mov.u64 %a, 16; mov.u32 %v, 1; st.global.u32 [%a], %v; ret; }
"""
driver, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuModuleLoadData(ctypes.byref(module), ptx) == 0
assert driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"bad") == 0
assert driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
torch.cuda.synchronize()
'''
ASSERT = "ones[torch.tensor([1 << 30], device='cuda')].sum().item()"
OUT_OF_MEMORY = "torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device='cuda')"


@pytest.mark.parametrize(
    ("failure", "code", "exit_code", "reason", "message"),
    [
        ("SIGKILL", "os.kill(os.getpid(), 9)", 137, "Signaled", r"Rank 1 was killed by SIGKILL"),
        ("exception", "raise ValueError('bad')", 1, "Exception", "ValueError: bad"),
        ("assertion on the device", ASSERT, 1, "Exception", "CUDA error: device-side assert"),
        ("out of GPU memory", OUT_OF_MEMORY, 1, "Exception", r"CUDA out of memory\."),
        ("illegal address", ILLEGAL, 1, "Exception", "CUDA error: an illegal memory access"),
    ],
)
def test_the_rank_that_failed_is_the_cause(
    launcher: Launcher,
    record_property: Note,
    failure: str,
    code: str,
    exit_code: int,
    reason: str,
    message: str,
) -> None:
    code = f"if rank == 1:\n{textwrap.indent(code, '    ')}"
    result = run(launcher, "gloo", 2, code)
    seen = str(result.message.get("message", ""))
    record_property(failure, f"{result.message.get('reason')}: {seen.partition(chr(10))[0]}")
    assert (result.exit_code, result.message["reason"]) == (exit_code, reason), result.err
    assert result.message["rank"] == 1
    assert re.search(message, seen), seen


# Each round takes three quarters of the memory, and the first one is killed with it.
FILLS = """
    free, total = torch.cuda.mem_get_info()
    print(os.environ["TORCHRUN_ROUND"], free >> 20, flush=True)
    held = torch.empty(total * 3 // 4, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    if os.environ["TORCHRUN_ROUND"] != "2":
        os.kill(os.getpid(), 9)
"""


def test_the_next_round_has_the_memory_of_the_one_before(
    launcher: Launcher, record_property: Note
) -> None:
    limits = json.dumps({"restarts": 2, "exitCodes": [], "signals": []})
    result = run(launcher, "nccl", 1, FILLS, TORCHRUN_IN_PLACE_RESTARTS=limits)
    waits = [line for line in result.err.splitlines() if "GPU memory" in line]
    free = [int(line.split()[1]) for line in result.out.splitlines()]
    record_property("restarts in place", f"free MiB at the start of each round: {free}; {waits}")
    assert result.exit_code == 0, result.err
    assert [line.split()[0] for line in result.out.splitlines()] == ["0", "1", "2"]
    assert min(free) > free[0] - 256


def test_a_kernel_that_never_ends_is_a_hang(launcher: Launcher, record_property: Note) -> None:
    code = """
        print("blocks", flush=True)
        torch.cuda._sleep(1 << 60)
        torch.cuda.synchronize()
    """
    # torchrun warns if OMP_NUM_THREADS is not set, and the watch would start with this output.
    limit = {"TORCHRUN_HANG_TIMEOUT_SECONDS": "10", "OMP_NUM_THREADS": "1"}
    result = run(launcher, "gloo", 2, code, **limit)
    record_property("a kernel that never ends", result.message.get("message", ""))
    assert (result.exit_code, result.message["reason"]) == (124, "Hung"), result.err
    assert "synchronize" in result.err, "the stacks of the ranks"
    after = run(launcher, "nccl", 1, "print('works', flush=True)")
    assert (after.exit_code, after.out) == (0, "works\n"), after.err


SAVES = """
    step = 0
    while True:
        dist.all_reduce(ones)
        ones.fill_(1)
        step += 1
        torchrun_progress.report(step=step)
        left = torchrun_progress.stopping()
        if left is not None:
            torch.save(ones, f"saved.{rank}")
            print("saved", step, flush=True)
            break
        if step == 20:
            print("ready", flush=True)
"""


def test_ranks_save_at_the_same_step(launcher: Launcher, record_property: Note) -> None:
    launched = launcher.start(["python", "train.py"], **variables("gloo", 2, SAVES))
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop()
    result = launched.end()
    record_property("SIGTERM with stopping()", result.message.get("message", ""))
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped"), result.err
    first, second = result.out.splitlines()
    assert first == second
    assert first.startswith("saved ")
    assert {path.name for path in launcher.directory.glob("saved.*")} == {"saved.0", "saved.1"}


def test_lines_of_nccl_are_understood(launcher: Launcher, record_property: Note) -> None:
    log = launcher.directory / "nccl.txt"
    options = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
    result = run(launcher, "nccl", 1, "pass", NCCL_DEBUG_FILE=str(log), **options)
    assert result.exit_code == 0, result.err
    finder = TransportFinder()
    lines = log.read_text().splitlines()
    for line in lines:
        finder.read(line)
    assert finder.transport is None, "no connection to another node"
    used = [line.partition(" NCCL INFO ")[2] for line in lines if "NET/" in line or "Using" in line]
    # As between two nodes, of which this machine is one.
    finder.read("h:1:1 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0")
    assert finder.transport is not None
    device = finder.transport.device
    record_property("NCCL's log of one node", f"no network; device 0 of Socket: {device or 'none'}")
    assert bool(device) == any("NET/Socket : Using" in line for line in used), used


STEPS = """
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    data = torch.randn(256, 2048, device="cuda")
    times = []
    for step in range(300):
        start = time.perf_counter()
        model(data).square().mean().backward()
        torch.cuda.synchronize()
        torchrun_progress.report(step=step)
        times.append(time.perf_counter() - start)
    print("step", sorted(times[100:])[100] * 1000, flush=True)
"""


def test_the_time_of_steps_beside_that_without_the_launcher(
    launcher: Launcher, record_property: Note
) -> None:
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(3):
        result = run(launcher, "nccl", 1, STEPS)
        assert result.exit_code == 0, result.err
        times["with"].append(_milliseconds(result.out))
        bare = subprocess.run(
            [PYTHON, "-m", "torch.distributed.run", "train.py"],
            env={**os.environ, **variables("nccl", 1, STEPS), "PYTHONPATH": str(FOLDER / "rank")},
            cwd=launcher.directory,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        times["without"].append(_milliseconds(bare.stdout))
    own, other = (statistics.median(times[name]) for name in ("with", "without"))
    seen = f"{own:.3f} ms with the launcher, {other:.3f} ms without: ratio {own / other:.3f}"
    print(seen)  # the ratio is the result: other work of the machine decides as well
    record_property("median of steps", seen)


def _milliseconds(out: str) -> float:
    return float(next(line for line in out.splitlines() if line.startswith("step")).split()[1])
