"""Train a small character-level GPT on Shakespeare's sonnets, on one process or many.

    python train.py                                  one process
    torchrun --nproc-per-node 2 train.py             two processes on this machine
    kubectl torchrun submit --queue cpu "python train.py"     a TorchrunJob

What to copy into a script of your own so that it survives a lost machine:
  * what a step computes depends on the seed and the step alone (`Corpus.batch`),
  * a checkpoint is whole or absent, never half written (`save`),
  * every start looks for the newest checkpoint and goes on from there (`resume`),
  * when a pod has to end, all ranks stop after the same step with a checkpoint of that step: in a
    job by torchrun_progress.stopping() (`train`), elsewhere by SIGTERM (`StopSignal`, `advance`),
  * every step is reported (`train`): it shows in `kubectl get tj -o wide`, and a run that hangs is
    found and started again where the queue or the job sets reliability.hangTimeoutSeconds.
"""

import argparse
import math
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, Config
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

try:
    import torchrun_progress  # in a worker's pod it is there, whatever the image
except ImportError:
    torchrun_progress = None

HERE = Path(__file__).resolve().parent
CHECKPOINTS_KEPT = 2
EXIT_SIGTERM = 128 + signal.SIGTERM  # not 0: an unfinished run must not pass for a finished one


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def default_checkpoint_dir() -> Path | None:
    """The directory that all gangs of a job share; none outside a job or without storage for it."""
    named = os.environ.get("TORCHRUN_CHECKPOINT_DIR")
    return Path(named) if named else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small character-level GPT with DistributedDataParallel.",
        epilog="TORCHRUN_BACKEND names the torch.distributed backend; without it nccl is used "
        "where there are GPUs and gloo elsewhere.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, default=HERE / "sonnets.txt", help="text to learn, UTF-8")
    add("--steps", type=positive, default=60, help="optimizer steps, with those before a resume")
    add("--batch", type=positive, default=32, help="sequences per step, shared by all ranks")
    add("--context", type=positive, default=64, help="characters per sequence")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--heads", type=positive, default=4, help="attention heads; must divide --width")
    add("--width", type=positive, default=64, help="size of a character's vector")
    add("--learning-rate", type=float, default=3e-3, help="peak of the schedule")
    add("--seed", type=int, default=1609, help="of the weights, the order of the text, the sample")
    add("--log-every", type=positive, default=5, help="steps between two lines of each rank")
    add("--checkpoint-every", type=positive, default=20, help="steps between two checkpoints")
    add(
        "--checkpoint-dir",
        type=Path,
        default=default_checkpoint_dir(),
        help="folder that all ranks see; $TORCHRUN_CHECKPOINT_DIR, which a job has",
    )
    add("--sample", type=int, default=200, help="characters to write at the end; 0 for none")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


class StopSignal:
    """Remembers a SIGTERM, so that the training loop can act on it between two steps.

    A script that runs only as a TorchrunJob does not need it: see stopping() in `train`.
    """

    def __init__(self):
        self.received = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number, frame):
        self.received = True


class Ranks:
    """The processes that train together. Without torchrun this process is a group of one."""

    def __init__(self):
        on_gpu = torch.cuda.is_available()
        backend = os.environ.get("TORCHRUN_BACKEND") or ("nccl" if on_gpu else "gloo")
        if backend == "nccl" and not on_gpu:
            raise SystemExit(
                "the backend is nccl and this process sees no GPU: set distributed.backend to gloo "
                "in the TorchrunJob (TORCHRUN_BACKEND=gloo elsewhere), or use a queue with GPUs"
            )
        self.device = torch.device("cpu")
        if on_gpu:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        timeout = timedelta(minutes=5)
        if "RANK" in os.environ:  # set by torchrun, with WORLD_SIZE, MASTER_ADDR and MASTER_PORT
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        self.backend = backend
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def say(self, message: str) -> None:
        # One write for each line: torchrun unbuffers its ranks, and their lines share one pipe.
        print(f"[rank {self.rank}] {message}\n", end="", flush=True)


class Corpus:
    """A text as character ids: the first 90 % to learn from, the rest held out."""

    def __init__(self, path: Path, context: int, device: torch.device):
        text = path.read_text(encoding="utf-8")
        if len(text) < 20 * context:
            raise SystemExit(f"{path} has {len(text)} characters: too few for --context {context}")
        self.alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(self.alphabet)}
        ids = torch.tensor([number[character] for character in text], device=device)
        self.learned, self.held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
        self.window = torch.arange(context + 1, device=device)

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """The `size` sequences [size, context + 1] of one step.

        They depend on seed and step alone: a run that resumes, even on another number of ranks,
        learns from the same sequences in the same order as a run that was never interrupted.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = len(self.learned) - len(self.window)
        starts = torch.randint(last + 1, (size, 1), generator=generator)
        return self.learned[starts.to(self.window.device) + self.window]

    def held_out_batch(self) -> Tensor:
        """The held-out text cut into sequences [n, context + 1]."""
        return self.held_out.unfold(0, len(self.window), len(self.window))

    def text(self, ids: Tensor) -> str:
        return "".join(self.alphabet[index] for index in ids.tolist())


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Ten steps of warm-up, then half a cosine down to a tenth of the peak."""
    warm_up = min(1.0, step / 10)
    return peak * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def save(folder: Path, step: int, state: dict) -> Path:
    """Write under another name, force it to disk, rename: readers see a whole file or none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # or the rename may be lost with the machine
    os.close(directory)
    for old in checkpoints(folder)[:-CHECKPOINTS_KEPT]:
        old.unlink()
    return path


def newest_checkpoint(folder: Path | None, ranks: Ranks) -> dict | None:
    """The newest checkpoint that rank 0 sees, read by every rank from the shared folder."""
    steps = checkpoints(folder) if folder else []
    step = torch.tensor(int(steps[-1].stem.removeprefix("step-")) if steps else 0)
    step = step.to(ranks.device)
    dist.broadcast(step, src=0)
    if folder is None or step.item() == 0:
        return None
    path = folder / f"step-{step.item():08d}.pt"
    if not path.exists():
        raise SystemExit(
            f"rank {ranks.rank} does not see {path}, which rank 0 sees: --checkpoint-dir must be "
            "one folder for all nodes (a ReadWriteMany claim)"
        )
    return torch.load(path, map_location=ranks.device, weights_only=True)


class Trainer:
    """Model, optimizer and the step reached: all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, corpus: Corpus):
        self.args, self.ranks, self.corpus = args, ranks, corpus
        shape = (len(corpus.alphabet), args.context, args.layers, args.heads, args.width)
        torch.manual_seed(args.seed)
        self.model = GPT(Config(*shape)).to(ranks.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.step = 0
        self.loss = math.nan
        self.resume()
        # Copies rank 0's weights to all ranks, then averages their gradients in each backward().
        self.parallel = DistributedDataParallel(self.model)

    def resume(self) -> None:
        state = newest_checkpoint(self.args.checkpoint_dir, self.ranks)
        if state is None:
            return
        if state["config"] != asdict(self.model.config):
            raise SystemExit(
                f"the checkpoint in {self.args.checkpoint_dir} is of {state['config']} and this "
                f"model is {asdict(self.model.config)}: use the same shape or another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss = state["step"], state["loss"]
        self.ranks.say(f"resumed after step {self.step}/{self.args.steps}")

    def advance(self, stop: StopSignal) -> bool:
        """Do one step on this rank's share of the batch; return whether a rank got SIGTERM."""
        self.step += 1
        args, ranks = self.args, self.ranks
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(args.learning_rate, self.step, args.steps)
        batch = self.corpus.batch(args.seed, self.step, args.batch)
        share = self.mean_loss(self.parallel, batch[ranks.rank :: ranks.count], len(batch))
        self.optimizer.zero_grad()
        (share * ranks.count).backward()  # DDP divides the sum by the number of ranks
        self.optimizer.step()
        # One small exchange tells every rank the loss of the whole batch and whether to stop: a
        # rank that stopped by itself would leave the others waiting for it.
        shared = torch.stack([share.detach(), share.new_tensor(float(stop.received))])
        dist.all_reduce(shared)
        self.loss, told_to_stop = shared.tolist()
        return told_to_stop > 0

    @staticmethod
    def mean_loss(model: torch.nn.Module, rows: Tensor, of: int) -> Tensor:
        """What `rows` add to the mean loss of a batch of `of` sequences."""
        logits = model(rows[:, :-1])
        total = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        return total / (of * (rows.shape[1] - 1))

    def checkpoint(self) -> None:
        """Save from rank 0; the others go on when the file is on disk."""
        if self.args.checkpoint_dir is None:
            return
        if self.ranks.rank == 0:
            state = {
                "config": asdict(self.model.config),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "loss": self.loss,
            }
            path = save(self.args.checkpoint_dir, self.step, state)
            self.ranks.say(f"saved {path}")
            if torchrun_progress:
                torchrun_progress.checkpoint(self.step, path, complete=True)
        dist.barrier()


def train(trainer: Trainer, stop: StopSignal) -> bool:
    """Train to the last step, True, or until the ranks have to stop, False."""
    args, ranks = trainer.args, trainer.ranks
    since, tokens, rate = time.perf_counter(), 0, None
    while trainer.step < args.steps:
        told_to_stop, told_to_save = trainer.advance(stop), False
        tokens += args.batch * args.context
        step, finished = trainer.step, trainer.step == args.steps
        if step == 1 or step % args.log_every == 0 or finished:
            rate = tokens / (time.perf_counter() - since)
            ranks.say(f"step {step}/{args.steps} loss {trainer.loss:.4f} ({rate:.0f} tokens/s)")
            since, tokens = time.perf_counter(), 0
        if torchrun_progress:
            speed = rate and rate / args.context
            torchrun_progress.report(step, args.steps, trainer.loss, samples_per_second=speed)
            # Both are true on all ranks after the same step.
            told_to_stop = torchrun_progress.stopping() is not None or told_to_stop
            told_to_save = torchrun_progress.save_requested()
        due = step % args.checkpoint_every == 0
        if due or finished or told_to_stop or told_to_save:
            trainer.checkpoint()
        if told_to_stop and not finished:
            return False
    return True


@torch.no_grad()
def conclude(trainer: Trainer) -> None:
    """Print the final loss, and from rank 0 the held-out loss and a sample of text."""
    args, ranks, corpus, model = trainer.args, trainer.ranks, trainer.corpus, trainer.model
    ranks.say(f"finished {args.steps} steps, final loss {trainer.loss:.6f}")
    if ranks.rank != 0:
        return
    held_out = corpus.held_out_batch()
    ranks.say(f"held-out loss {trainer.mean_loss(model, held_out, len(held_out)).item():.6f}")
    if args.sample > 0:
        start = corpus.learned[:1].unsqueeze(0)
        generator = torch.Generator().manual_seed(args.seed)
        sample = model.generate(start, args.sample, generator)
        ranks.say("a sample of what it writes:\n" + corpus.text(sample[0]))


def main() -> int:
    args = arguments()
    stop = StopSignal()
    torch.set_num_threads(1)  # a model this small is fastest with one core per rank
    ranks = Ranks()
    if args.batch < ranks.count:
        raise SystemExit(
            f"--batch {args.batch} leaves some of the {ranks.count} ranks without work"
        )
    corpus = Corpus(args.data, args.context, ranks.device)
    trainer = Trainer(args, ranks, corpus)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    ranks.say(
        f"one of {ranks.count} on {socket.gethostname()}: {parameters} parameters, "
        f"{ranks.device}, {ranks.backend}, checkpoints in {args.checkpoint_dir or 'no folder'}"
    )
    finished = train(trainer, stop)
    if finished:
        conclude(trainer)
    else:
        ranks.say(f"stopped after step {trainer.step}/{args.steps}")
    dist.destroy_process_group()
    return 0 if finished else EXIT_SIGTERM


if __name__ == "__main__":
    sys.exit(main())
