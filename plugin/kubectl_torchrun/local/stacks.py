"""The stacks of a run on this machine."""

import msgspec

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.logs.stacks import ProcessStack, show
from torchrun_runtime.launch.stacks import snapshot


def print_stacks(name: str, form: str) -> int:
    """Print the stacks of a run's ranks. Raises UsageProblem if nothing of it runs."""
    stacks = msgspec.convert(snapshot(name), list[ProcessStack])
    if not stacks:
        raise UsageProblem(f"No process of the run {name} is running on this machine.")
    show(stacks, form)
    return 0
