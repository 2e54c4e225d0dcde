"""Find torchrun in the user's image, and set what its ranks share."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Mapping

from . import contract
from .cause import LaunchError
from .command import SHELL, Run, only_program
from .contract import NOT_FOUND

_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_RUN = "torch.distributed.run"
_IN_ENVIRONMENT = ["python"]
_FREQUENT = ("python", "python3", "torchrun", "accelerate")
_PROBE_SECONDS = 60
_ENVIRONMENT_SECONDS = 1800  # the first start may install the environment
THREADS = "OMP_NUM_THREADS"


def python() -> str:
    """The image's `python` or `python3`; else the one that runs the launcher."""
    return shutil.which("python") or shutil.which("python3") or sys.executable


def with_torch(run: Run) -> Run:
    """The run, or its unchanged shell line if that works without torch.

    A line such as `cd src && python prepare.py` may have nothing to do with torch.
    """
    if not (run.under_torchrun and run.as_it_is) or _finds_torch(run):
        return run
    return Run(list(run.as_it_is), False, "its Python cannot import torch")


def argv(run: Run) -> list[str]:
    """The whole command line. torchrun reads nodes and rendezvous from PET_*.

    Raises LaunchError (TorchMissing, CommandNotFound) for what the image lacks.
    """
    if not run.under_torchrun:
        *shell, line = run.argv
        return _shell_line(line) if shell == [SHELL, "-c"] else run.argv
    program = [*_IN_ENVIRONMENT, "-m", _RUN] if run.in_environment else _program(run)
    ranks = [*program, "--no-python", *run.argv]
    if not (run.before or run.after):
        return ranks
    return [SHELL, "-c", f"{run.before}{shlex.join(ranks)}{run.after}"]


def _shell_line(line: str) -> list[str]:
    """The line, with `exec` if it is one program: the command is then the program itself.

    It gets the signals, and its `kill 0` ends no shell around it.
    """
    program = only_program(line)
    if program and "/" not in program and not shutil.which(program):
        near = difflib.get_close_matches(
            program, ("python", "python3", "torchrun", "accelerate"), 1
        )
        hint = f" Did you mean {near[0]}?" if near else ""
        raise LaunchError(
            "CommandNotFound",
            f"The image has no program {program}.{hint} PATH: {os.environ.get('PATH', '')}",
            exit_code=NOT_FOUND,
        )
    return [SHELL, "-c", f"exec {line.strip()}" if program else line]


def python_of_torchrun(run: Run) -> list[str]:
    """The start of a command line of the Python that runs torchrun; empty if it is not known."""
    program = None if run.in_environment else shutil.which("torchrun")
    if run.in_environment or not program:
        return _IN_ENVIRONMENT if run.in_environment else [_interpreter(run)]
    with suppress(OSError), open(program, "rb") as file:
        first = file.readline(256)
        words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
        if words and os.path.basename(words[-1]).startswith("python"):
            return words
    return []


def words_of_torchrun(run: Run, argv: list[str]) -> int:
    """How many words of the command line start torchrun; 0 if a shell or another program does."""
    if not run.under_torchrun or run.in_environment or argv[:1] == [SHELL]:
        return 0
    words = argv.index("--no-python")
    if words == 1:  # a script, which pip has made, or somebody else
        with suppress(OSError), open(argv[0], "rb") as file:
            return words if _RUN.encode() in file.read(4096) else 0
    return words


def default_threads(environment: Mapping[str, str]) -> str:
    """OMP_NUM_THREADS: the CPUs that the pod requests, shared by its ranks; "" if it is set.

    torchrun's own default is 1 thread for each of several ranks; without torchrun, one rank has a
    thread for each CPU of the machine, whatever its pod may use.
    """
    cpus = environment.get(contract.CPUS, "")
    ranks = environment.get(contract.PET_NPROC_PER_NODE, "")
    if THREADS in environment or not (cpus.isdecimal() and ranks.isdecimal()) or cpus == "0":
        return ""
    return str(max(1, int(cpus) // max(1, int(ranks))))


def _program(run: Run) -> list[str]:
    program = shutil.which("torchrun")
    if program:
        return [program]
    interpreter = _interpreter(run)
    if not _succeeds([interpreter, "-c", _HAS_TORCH], _PROBE_SECONDS):
        raise LaunchError(
            "TorchMissing",
            f"The image has no torch: torchrun is not on PATH and {interpreter} cannot import"
            " torch. Use an image with PyTorch, or set launcher: none to run the command without"
            " torchrun.",
        )
    return [interpreter, "-m", _RUN]


def _finds_torch(run: Run) -> bool:
    if run.in_environment:
        probe = f"{run.before}{shlex.join([*_IN_ENVIRONMENT, '-c', _HAS_TORCH])}"
        return _succeeds([SHELL, "-c", probe], _ENVIRONMENT_SECONDS)
    if shutil.which("torchrun"):
        return True
    return _succeeds([_interpreter(run), "-c", _HAS_TORCH], _PROBE_SECONDS)


def _interpreter(run: Run) -> str:
    return shutil.which(run.interpreter or python()) or python()


def _succeeds(argv: list[str], seconds: float) -> bool:
    """Whether the program ends with 0. Slow storage does not prove that torch is missing."""
    try:
        return subprocess.run(argv, timeout=seconds, check=False).returncode == 0
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        return True
