"""Warnings of commands that may train on each node alone, or lack their script."""

import os

from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload.tree import Tree
from torchrun_api.json import JsonObject, object_at
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.command import decide

_SHOWN = 60  # characters of the command


def warn_of_command(spec: JsonObject, terminal: Display) -> None:
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


def warn_of_missing_script(spec: JsonObject, files: Tree, terminal: Display) -> None:
    """Print a note if the upload lacks the script of the command."""
    command, directory = spec.get("command"), str(spec.get("workingDir", ""))
    words = [str(word) for word in command] if isinstance(command, list) else str(command or "")
    try:
        script = decide(words, "auto", "", "python").script if words else ""
    except LaunchError:
        return
    path = os.path.normpath(os.path.join(directory, script))
    may_be_made = "setupCommand" in spec or path.startswith(("/", ".."))
    if not script or may_be_made or any(file.path == path for file in files.files):
        return
    skipped = next((each.reason for each in files.skipped if each.path == path), "")
    if skipped:
        why = f"skipped: it {skipped}"
    elif (files.root / path).exists():
        why = "an ignore file excludes it"
    else:
        why = f"{files.root} has no such file"
    terminal.note(f"Warning: the upload lacks {path}, which the command runs ({why}).")


def _has_several_ranks(spec: JsonObject) -> bool:
    sizes = (
        spec.get("numNodes"),
        spec.get("numGPUs"),
        object_at(spec, "distributed").get("nprocPerNode"),
    )
    return any(isinstance(size, int) and size > 1 for size in sizes)
