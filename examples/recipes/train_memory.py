"""Checkpoints in memory: after the failure of a rank, every node continues from its /dev/shm.

kubectl torchrun submit --queue gpu --nodes 2 "python train_memory.py"
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

durable = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "memory.pt"
memory = Path(os.environ.get("MEMORY_DIR", "/dev/shm")) / "checkpoints"
memory.mkdir(parents=True, exist_ok=True)
use_gpu = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
if use_gpu:
    torch.cuda.set_device(device)
dist.init_process_group(os.environ.get("TORCHRUN_BACKEND"))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def remembered() -> dict[int, Path]:
    """The complete checkpoints in the memory of this node, by step."""
    return {int(path.stem): path for path in memory.glob("*.pt")}


def newest_checkpoint() -> Path | None:
    """The newest one that all nodes have: one may have died before it wrote the last step."""
    steps = [set()] * world_size
    dist.all_gather_object(steps, set(remembered()))
    common = set.intersection(*steps)
    if common:
        return memory / f"{max(common)}.pt"
    return durable if durable.exists() else None


def save(path: Path, step: int) -> None:
    """Write a checkpoint. The rename makes it complete or absent, whenever the rank dies."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch. It depends only on the step, so a resumed run continues."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), inputs.sum(dim=1, keepdim=True).to(device)


start = 0
if newest := newest_checkpoint():
    state = torch.load(newest, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
    print(f"[rank {rank}] resumed after step {start} from {newest.parent}", flush=True)
for later in [step for step in remembered() if step > start]:  # not all nodes have it
    (memory / f"{later}.pt").unlink(missing_ok=True)  # another rank of this node removes it, too
parallel_model = DistributedDataParallel(model)

for step in range(start + 1, args.steps + 1):
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(parallel_model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
    is_due, stops = step % args.save_every == 0 or step == args.steps, False
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
        stops = torchrun_progress.stopping() is not None  # on all ranks at the same step
        is_due = is_due or stops or torchrun_progress.save_requested()
    if step % args.remember_every == 0 and os.environ["LOCAL_RANK"] == "0":
        save(memory / f"{step}.pt", step)
        for old in sorted(remembered())[:-2]:
            remembered()[old].unlink()
    if is_due:
        if rank == 0:
            save(durable, step)
            if torchrun_progress:
                torchrun_progress.checkpoint(step, durable, complete=True)
        dist.barrier()
    if stops:
        break

dist.destroy_process_group()
