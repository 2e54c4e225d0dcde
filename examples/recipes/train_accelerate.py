"""Hugging Face Accelerate: every rank saves its state into one directory.

kubectl torchrun submit --queue gpu --nodes 2 "python train_accelerate.py"
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import torchrun_progress  # on the PYTHONPATH of every pod
except ImportError:
    torchrun_progress = None

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100)
args = parser.parse_args()

checkpoints = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "accelerate"
# Without cpu=True, ranks without a GPU do not find each other and train alone.
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    # The order of the samples depends on seed and epoch only, so a resumed run keeps it.
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
rank = accelerator.process_index


def save(step: int) -> None:
    """Save under another name and rename, so that a checkpoint is complete or absent."""
    partial = checkpoints / "partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        path = partial.rename(checkpoints / f"step-{step:08d}")
        if torchrun_progress:
            torchrun_progress.checkpoint(step, path, complete=True)
    accelerator.wait_for_everyone()


set_seed(0)
inputs = torch.randn(512, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
newest = max(checkpoints.glob("step-*"), default=None)
if newest:
    accelerator.load_state(str(newest))
    step = int(newest.name.removeprefix("step-"))
    print(f"[rank {rank}] resumed after step {step}", flush=True)

ends = step >= args.steps
while not ends:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for batch, targets in accelerator.skip_first_batches(loader, done):
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
        is_due, ends = step % args.save_every == 0, step == args.steps
        if torchrun_progress:
            torchrun_progress.report(step=step, total=args.steps, loss=loss)
            # On all ranks at the same step.
            ends = torchrun_progress.stopping() is not None or ends
            is_due = is_due or torchrun_progress.save_requested()
        if is_due or ends:
            save(step)
        if ends:
            break

accelerator.end_training()
