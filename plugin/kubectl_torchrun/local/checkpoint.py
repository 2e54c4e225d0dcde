"""The request for a checkpoint of a run on this machine."""

import msgspec

from kubectl_torchrun.cluster.slices import CheckpointSlice
from kubectl_torchrun.logs.checkpoint import SaveAnswer, follow
from kubectl_torchrun.terminal import Display
from torchrun_runtime.launch.checkpoints import newest_of_round
from torchrun_runtime.launch.save import ask
from torchrun_runtime.launch.stacks import commands


def request_checkpoint(name: str, seconds: float, terminal: Display) -> int:
    """Ask the ranks of a run to save and go on; the exit code. Raises Problem.

    seconds: for all of it.
    """
    answers = (msgspec.convert(answer, SaveAnswer) for answer in ask(seconds, name))
    stacks = f"kubectl torchrun stacks {name} --local"
    return follow(answers, lambda: _read_last(name), seconds, stacks, terminal)


def _read_last(name: str) -> CheckpointSlice | None:
    newest = newest_of_round(commands(name))
    return msgspec.convert(newest._asdict(), CheckpointSlice) if newest else None
