"""Stored runs: JSON files under bench/results, each with its commit, machine and load."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from torchrun_bench.report import RESULTS, Row, commit, machine
from torchrun_bench.turns import Restarted, Turn


class Results(msgspec.Struct):
    """The figures of a run."""

    rows: list[Row] = []
    turns: list[Turn] = []
    restarts: list[Restarted] = []
    versions: dict[str, str] = {}


class Run(Results):
    """A stored run. `load` is that of the machine at its end, with the load of the run itself."""

    time: str = ""
    commit: str = ""
    parts: list[str] = []
    python: str = ""
    machine: str = ""
    load: list[float] = []


def save(results: Results, parts: Sequence[str]) -> Path:
    """Store the figures. Returns the file."""
    now = datetime.now(UTC)
    run = Run(
        **{name: getattr(results, name) for name in Results.__struct_fields__},
        time=now.isoformat(timespec="seconds"),
        commit=commit(),
        parts=list(parts),
        python=platform.python_version(),
        machine=machine(),
        load=[round(load, 1) for load in os.getloadavg()],
    )
    path = RESULTS / f"{now:%Y%m%d-%H%M%S}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    return path
