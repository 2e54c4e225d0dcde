"""The request for a checkpoint of a run on this machine."""

import msgspec

from kubectl_torchrun.logs.checkpoint import SaveAnswer, show
from kubectl_torchrun.terminal import Display
from torchrun_runtime.launch.save import ask


def request_checkpoint(name: str, terminal: Display) -> int:
    """Ask the ranks of a run to save and go on; the exit code."""
    return show((msgspec.convert(answer, SaveAnswer) for answer in ask(name)), terminal)
