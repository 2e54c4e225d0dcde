"""A pod without a cluster: a workspace with a call, and its processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrun_sdk.call.gang import write_overlay
from torchrun_sdk.spec import (
    ENTRY,
    FOLDER,
    Call,
    Exited,
    Frame,
    Here,
    Lines,
    Raised,
    Result,
    Started,
    decode,
)

from .played_cluster import locked

WAITS = 200.0  # seconds that a pod waits for a client, which a busy machine starts late
SECONDS = 120  # of each wait for another process; long, for a busy machine


def replace_text(path: Path, text: str) -> None:
    """Write a file that other processes read: they see the old text or the new one, never half."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


@contextmanager
def changing_job(cluster: Path) -> Iterator[dict[str, Any]]:
    """The job of the test's cluster. It is stored with its changes at the end of the block."""
    path = cluster / "job.json"
    with locked(cluster):
        job = json.loads(path.read_text())
        yield job
        replace_text(path, json.dumps(job))


def delete_job(cluster: Path) -> None:
    """Delete the job of the test's cluster, if there is one."""
    with locked(cluster):
        (cluster / "job.json").unlink(missing_ok=True)


class Pod:
    """A workspace with a call, and its processes."""

    def __init__(self, root: Path, call: Call) -> None:
        write_overlay(root / FOLDER, call)
        self.entry = root / FOLDER / ENTRY
        self.call = call
        self.root = root
        self.started: list[subprocess.Popen[str]] = []

    def rank(self, rank: int = 0, world: int = 1, **more: str) -> "subprocess.Popen[str]":
        environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        return self._start([], {**environment, **more})

    def collect(self, call: str | None = None, **more: str) -> "subprocess.Popen[str]":
        return self._start(["collect", self.call.id if call is None else call], more)

    def _start(self, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(self.entry), *arguments],
            cwd=self.root, env={"PATH": os.environ["PATH"], **environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process


def frames(collector: "subprocess.Popen[str]", last: type[Frame]) -> list[Frame | Lines]:
    """The frames of a rank up to the first of type `last`. Acknowledges each end of a rank."""
    received: list[Frame | Lines] = []
    assert collector.stdout is not None
    assert collector.stdin is not None
    assert collector.stderr is not None
    for line in collector.stdout:
        if line == ".\n":
            continue
        frame = decode(line)
        if isinstance(frame, Here):
            continue
        assert isinstance(frame, Started | Result | Raised | Exited | Lines), frame
        received.append(frame)
        if not isinstance(frame, Started):
            collector.stdin.write(f"{frame.rank}\n")
            collector.stdin.flush()
        if isinstance(frame, last):
            return received
    raise AssertionError(f"no {last.__name__} in {received}: {collector.stderr.read()}")
