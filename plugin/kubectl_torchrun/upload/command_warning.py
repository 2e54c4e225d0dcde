"""Warnings of commands that may train on each node alone, or lack their script."""

import os

from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload.tree import Tree
from torchrun_api.json import JsonObject, object_at
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.command import decide

_SHOWN = 60  # characters of the command


def warn_of_command(spec: JsonObject, terminal: Display, files: Tree | None = None) -> None:
    """Print a note if a command of several ranks runs without torchrun, or lacks its script.

    `spec` is that of the TorchrunJob, `files` what is uploaded; None for a run on this machine,
    which says at once that a script is missing. The launcher decides in the same way.
    """
    command = spec.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else str(command or "")
    if not words:
        return
    try:
        run = decide(words, "auto", "", "python")
    except LaunchError:  # the launcher says so in the pods
        return
    is_opaque = not (run.under_torchrun or run.starts_ranks)
    if is_opaque and spec.get("launcher", "auto") == "auto" and _has_several_ranks(spec):
        text = words if isinstance(words, str) else " ".join(words)
        shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        terminal.note(
            f"Warning: {shown!r} does not run under torchrun, because {run.why}. Unless it starts"
            " torchrun itself, each node trains alone. Use a command such as python train.py, or"
            " set launcher: torchrun to run it in every rank. launcher: none accepts it."
        )
    if files is not None and run.script:
        path = os.path.normpath(os.path.join(str(spec.get("workingDir", "")), run.script))
        may_be_made = "setupCommand" in spec or path.startswith(("/", ".."))
        if not may_be_made and all(file.path != path for file in files.files):
            why = _why_missing(path, files)
            terminal.note(f"Warning: the upload lacks {path}, which the command runs ({why}).")


def _why_missing(path: str, files: Tree) -> str:
    for skipped in files.skipped:
        if skipped.path == path:
            return f"skipped: it {skipped.reason}"
    if (files.root / path).exists():
        return "an ignore file excludes it"
    return f"{files.root} has no such file"


def _has_several_ranks(spec: JsonObject) -> bool:
    sizes = (
        spec.get("numNodes"),
        spec.get("numGPUs"),
        object_at(spec, "distributed").get("nprocPerNode"),
    )
    return any(isinstance(size, int) and size > 1 for size in sizes)
