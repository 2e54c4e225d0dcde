"""A warning of commands that may train on each node alone."""

from kubectl_torchrun.terminal import Terminal
from torchrun_api.json import JsonObject, object_at
from torchrun_runtime.launch.command import decide
from torchrun_runtime.launch.errors import LaunchError

_SHOWN = 60  # characters of the command


def warn_of_command(spec: JsonObject, terminal: Terminal) -> None:
    """Print a note if a job of several nodes or ranks runs a command without torchrun.

    `spec` is that of the TorchrunJob. The launcher decides in the same way.
    """
    command, launcher = spec.get("command"), spec.get("launcher", "auto")
    words = [str(word) for word in command] if isinstance(command, list) else str(command or "")
    if launcher != "auto" or not words or not _has_several_ranks(spec):
        return
    try:
        run = decide(words, "auto", "", "python")
    except LaunchError:  # the launcher says so in the pods
        return
    if run.under_torchrun or run.starts_ranks:
        return
    text = words if isinstance(words, str) else " ".join(words)
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    terminal.note(
        f"Warning: {shown!r} does not run under torchrun, because {run.why}. Unless it starts"
        " torchrun itself, each node trains alone. Use a command such as python train.py, or set"
        " launcher: torchrun to run it in every rank. launcher: none accepts it."
    )


def _has_several_ranks(spec: JsonObject) -> bool:
    sizes = (
        spec.get("numNodes"),
        spec.get("numGPUs"),
        object_at(spec, "distributed").get("nprocPerNode"),
    )
    return any(isinstance(size, int) and size > 1 for size in sizes)
