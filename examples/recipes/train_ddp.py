"""DistributedDataParallel: rank 0 writes one file, and every rank reads it.

kubectl torchrun submit --queue gpu --nodes 2 "python train_ddp.py"
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
parser.add_argument("--save-every", type=int, default=100)
args = parser.parse_args()

checkpoint = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "ddp.pt"
use_gpu = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
if use_gpu:
    torch.cuda.set_device(device)
dist.init_process_group(os.environ.get("TORCHRUN_BACKEND"))
rank, world_size = dist.get_rank(), dist.get_world_size()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch. It depends only on the step, so a resumed run continues."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), inputs.sum(dim=1, keepdim=True).to(device)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
if checkpoint.exists():
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
    print(f"[rank {rank}] resumed after step {start}", flush=True)
model = DistributedDataParallel(model)

for step in range(start + 1, args.steps + 1):
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
    is_due, stops = step % args.save_every == 0 or step == args.steps, False
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
        stops = torchrun_progress.stopping() is not None  # on all ranks at the same step
        is_due = is_due or stops or torchrun_progress.save_requested()
    if is_due:
        if rank == 0:
            # The rename makes the checkpoint complete or absent, whenever the pod dies.
            partial = checkpoint.with_suffix(".partial")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, partial)
            partial.replace(checkpoint)
            if torchrun_progress:
                torchrun_progress.checkpoint(step, checkpoint, complete=True)
        dist.barrier()
    if stops:
        break

dist.destroy_process_group()
