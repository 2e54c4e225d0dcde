"""FSDP2 with DCP: every rank writes its shards, and any number of ranks can read them.

kubectl torchrun submit --queue gpu --nodes 2 "python train_fsdp2.py"
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

try:
    import torchrun_progress  # on the PYTHONPATH of every pod
except ImportError:
    torchrun_progress = None

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100)
args = parser.parse_args()

checkpoints = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "fsdp2"
device_type = "cuda" if torch.cuda.is_available() else "cpu"
if device_type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(os.environ.get("TORCHRUN_BACKEND"))
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh(device_type, (world_size,))


class Training(dcp.stateful.Stateful):
    """Model, optimizer and step, as DCP saves and loads them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def newest_checkpoint() -> Path | None:
    """The newest complete checkpoint. DCP writes .metadata last."""
    complete = [path.parent for path in checkpoints.glob("step-*/.metadata")]
    newest = [max(complete, default=None)]
    dist.broadcast_object_list(newest)  # all ranks must load the same one
    return newest[0]


torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
model.to(device_type)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
newest = newest_checkpoint()
if newest:
    dcp.load({"training": training}, checkpoint_id=newest)
    print(f"[rank {rank}] resumed after step {training.step}", flush=True)

while training.step < args.steps:
    step = training.step = training.step + 1
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(32, 64, generator=generator).to(device_type)
    loss = nn.functional.mse_loss(model(inputs), inputs.abs())
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
    is_due, stops = step % args.save_every == 0 or step == args.steps, False
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
        stops = torchrun_progress.stopping() is not None  # on all ranks at the same step
        is_due = is_due or stops or torchrun_progress.save_requested()
    if is_due:
        path = checkpoints / f"step-{step:08d}"
        dcp.save({"training": training}, checkpoint_id=path)
        if torchrun_progress:
            torchrun_progress.checkpoint(step, path)
    if stops:
        break

dist.destroy_process_group()
