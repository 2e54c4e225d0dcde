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
    """Report each step to Torchrun Controller."""

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

    def on_train_epoch_start(self, trainer, module):
        saved = trainer.checkpoint_callback.last_model_path  # after the epoch before
        if torchrun_progress and saved:
            torchrun_progress.checkpoint(trainer.global_step, saved)


torch.manual_seed(0)
inputs = torch.randn(512, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=-1,
    max_steps=args.steps,
    # torchrun sets both variables, so the sizes of the job apply.
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    # After each epoch. save_last keeps a copy that ckpt_path="last" finds.
    callbacks=[ModelCheckpoint(checkpoints, save_last=True), Progress()],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(dataset, batch_size=32, shuffle=True), ckpt_path="last")
