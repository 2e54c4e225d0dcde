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
    if torchrun_progress:
        torchrun_progress.report(step=step, total=args.steps, loss=loss)
    if step % args.save_every == 0 or step == args.steps:
        engine.save_checkpoint(str(checkpoints), client_state={"step": step})

deepspeed.comm.destroy_process_group()
