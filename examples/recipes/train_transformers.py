"""Transformers Trainer: it saves every few steps and resumes from the last checkpoint.

kubectl torchrun submit --queue gpu --nodes 2 "python train_transformers.py"
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

try:
    import torchrun_progress  # on the PYTHONPATH of every pod
except ImportError:
    torchrun_progress = None

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100)
args = parser.parse_args()

checkpoints = Path(os.environ.get("TORCHRUN_CHECKPOINT_DIR", "/checkpoints")) / "transformers"


class Tokens(torch.utils.data.Dataset):
    """Random sequences, in place of a tokenized text."""

    def __init__(self):
        self.ids = torch.randint(64, (512, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Progress(TrainerCallback):
    """Report each step to Torchrun Controller."""

    def on_train_begin(self, arguments, state, control, **objects):
        if state.global_step:
            print(
                f"[rank {arguments.process_index}] resumed after step {state.global_step}",
                flush=True,
            )

    def on_step_end(self, arguments, state, control, **objects):
        print(f"[rank {arguments.process_index}] step {state.global_step}", flush=True)
        if torchrun_progress:
            torchrun_progress.report(step=state.global_step, total=state.max_steps)
            if torchrun_progress.stopping() is not None:  # on all ranks at the same step
                control.should_save = control.should_training_stop = True
            elif torchrun_progress.save_requested():
                control.should_save = True

    def on_save(self, arguments, state, control, **objects):
        if torchrun_progress:
            path = checkpoints / f"checkpoint-{state.global_step}"
            torchrun_progress.checkpoint(state.global_step, path)


def newest_checkpoint() -> str | None:
    """The newest complete checkpoint. The Trainer writes trainer_state.json last."""
    complete = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return str(newest) if newest else None


trainer = Trainer(
    model=GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    ),
    args=TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=args.steps,
        save_steps=args.save_every,
        save_total_limit=2,
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        # Without it, ranks without a GPU do not find each other and train alone.
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Tokens(),
    callbacks=[Progress()],
)
trainer.train(resume_from_checkpoint=newest_checkpoint())
