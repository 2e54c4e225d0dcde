"""Lightning: the Trainer saves and loads, torchrun starts the ranks.

kubectl torchrun submit --queue gpu --nodes 2 "python train_lightning.py"
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
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

checkpoints = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "lightning"


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Progress(Callback):
    """Report steps and checkpoints to Torchrun Controller, and stop when a pod has to end."""

    def on_train_start(self, trainer, module):
        if trainer.global_step:
            print(
                f"[rank {trainer.global_rank}] resumed after step {trainer.global_step}", flush=True
            )

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step, loss = trainer.global_step, outputs["loss"]
        print(f"[rank {trainer.global_rank}] step {step} loss {loss.item():.4f}", flush=True)
        if torchrun_progress:
            torchrun_progress.report(step=step, total=args.steps, loss=loss)
            stops = torchrun_progress.stopping() is not None  # on all ranks at the same step
            if stops or torchrun_progress.save_requested():
                trainer.save_checkpoint(checkpoints / "last.ckpt")
                torchrun_progress.checkpoint(step, checkpoints / "last.ckpt")
            trainer.should_stop = stops

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        step, saved = trainer.global_step, trainer.checkpoint_callback.last_model_path
        if torchrun_progress and saved and step % args.save_every == 0:  # after the batch before
            torchrun_progress.checkpoint(step, saved)


torch.manual_seed(0)
inputs = torch.randn(512, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=-1,
    max_steps=args.steps,
    # torchrun sets both variables, so the sizes of the job apply.
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    callbacks=[
        # save_last keeps a copy that ckpt_path="last" finds.
        ModelCheckpoint(checkpoints, save_last=True, every_n_train_steps=args.save_every),
        Progress(),
    ],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(dataset, batch_size=32, shuffle=True), ckpt_path="last")
