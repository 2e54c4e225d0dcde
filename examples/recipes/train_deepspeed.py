"""DeepSpeed ZeRO: every rank saves its partition, and `latest` names the complete checkpoint.

kubectl torchrun submit --queue gpu --nodes 2 "python train_deepspeed.py"
"""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn

try:
    import torchrun_progress  # on the PYTHONPATH of every pod
except ImportError:
    torchrun_progress = None

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100)
args = parser.parse_args()

checkpoints = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "deepspeed"
config = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}

deepspeed.init_distributed(os.environ.get("TORCHRUN_BACKEND"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()

_, state = engine.load_checkpoint(str(checkpoints))  # the one that `latest` names
start = state["step"] if state else 0
if start:
    print(f"[rank {rank}] resumed after step {start}", flush=True)

for step in range(start + 1, args.steps + 1):
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(32, 16, generator=generator).to(engine.device, torch.bfloat16)
    loss = nn.functional.mse_loss(engine(inputs), inputs.sum(dim=1, keepdim=True))
    engine.backward(loss)
    engine.step()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
    is_due, stops = step % args.save_every == 0 or step == args.steps, False
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
        stops = torchrun_progress.stopping() is not None  # on all ranks at the same step
        is_due = is_due or stops or torchrun_progress.save_requested()
    if is_due:
        path = checkpoints / f"step-{step:08d}"
        engine.save_checkpoint(str(checkpoints), tag=path.name, client_state={"step": step})
        if torchrun_progress:
            torchrun_progress.checkpoint(step, path)
    if stops:
        break

deepspeed.comm.destroy_process_group()
