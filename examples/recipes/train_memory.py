"""Checkpoints in memory: after the failure of a rank, every node continues from its /dev/shm.

kubectl torchrun submit --queue gpu --nodes 2 "python train_memory.py"

The memory of a pod survives a restart of its ranks, so frequent checkpoints cost no storage. A new
pod has none, and continues from the checkpoint of rank 0 on the PVC.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    import torchrun_progress  # on the PYTHONPATH of every pod
except ImportError:
    torchrun_progress = None

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100, help="to the PVC")
parser.add_argument("--remember-every", type=int, default=5, help="to memory")
args = parser.parse_args()

checkpoint = Path(os.environ.get("CHECKPOINT_DIR", "/checkpoints")) / "memory.pt"
memory = Path(os.environ.get("MEMORY_DIR", "/dev/shm")) / "checkpoints"
memory.mkdir(parents=True, exist_ok=True)
use_gpu = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
if use_gpu:
    torch.cuda.set_device(device)
dist.init_process_group(os.environ.get("TORCHRUN_BACKEND"))
rank, world_size = dist.get_rank(), dist.get_world_size()
writes_memory = os.environ["LOCAL_RANK"] == "0"  # all ranks of a node read its file


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch. It depends only on the step, so a resumed run continues."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), inputs.sum(dim=1, keepdim=True).to(device)


def remembered_steps() -> set[int]:
    """The steps of the complete checkpoints in the memory of this node."""
    return {int(path.stem) for path in memory.glob("*.pt")}


def newest_checkpoint() -> Path | None:
    """The newest checkpoint that every rank can read: in memory, else on the PVC."""
    steps: list[set[int] | None] = [None] * world_size
    dist.all_gather_object(steps, remembered_steps())
    # Nodes may have died between two writes, so they may not have the same steps.
    common = set.intersection(*(found for found in steps if found is not None))
    if common:
        return memory / f"{max(common)}.pt"
    return checkpoint if checkpoint.exists() else None


def save(path: Path, step: int) -> None:
    """Write a checkpoint. The rename makes it complete or absent, whenever the rank dies."""
    partial = path.with_suffix(".partial")
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step}, partial)
    partial.replace(path)


def remember(step: int) -> None:
    """Keep the state of this step and the one before in memory."""
    save(memory / f"{step}.pt", step)
    for old in sorted(remembered_steps())[:-2]:
        (memory / f"{old}.pt").unlink()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
newest = newest_checkpoint()
if newest is not None:
    state = torch.load(newest, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
    print(f"[rank {rank}] resumed after step {start} from {newest.parent}", flush=True)
for later in remembered_steps():  # of ranks that went on while others had failed
    if writes_memory and later > start:
        (memory / f"{later}.pt").unlink()
dist.barrier()
model = DistributedDataParallel(model)

for step in range(start + 1, args.steps + 1):
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
    if step % args.remember_every == 0 and writes_memory:
        remember(step)
    if step % args.save_every == 0 or step == args.steps:
        if rank == 0:
            save(checkpoint, step)
        dist.barrier()

dist.destroy_process_group()
