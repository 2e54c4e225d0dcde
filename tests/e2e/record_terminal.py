"""Records docs/recordings/terminal.cast, the plugin in a terminal on a real cluster: `make pictures`.

pytest collects this file by its name only. The format is asciicast v2; `asciinema play` shows it.
"""

import codecs
import json
import os
import pty
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from e2e.cluster import ROOT
from e2e.space import Space

RECORDING = ROOT / "docs" / "recordings" / "terminal.cast"
COLUMNS, ROWS = 100, 40
BETWEEN = 1.0  # seconds from the end of a command to the next prompt
TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.ones(1) * rank
dist.all_reduce(total)
print(f"rank {rank} of {world}: the sum of all ranks is {total.item():.0f}")
dist.destroy_process_group()
"""
SUBMIT = "kubectl torchrun submit --queue cpu --nodes 2"
FIRST = f'{SUBMIT} --name hello "python train.py"'
EDIT = """echo 'open(f"shard-{rank}.bin")' >> train.py"""
SECOND = f'{SUBMIT} --name shards --no-follow "python train.py"'
EXPLAIN = ("kubectl torchrun why shards", "kubectl torchrun status shards --no-watch")


class Session:
    """A shell in a terminal. events: as asciicast has them, with the seconds of this session."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = {**environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self._start = time.monotonic()
        self._skipped = 0.0
        self.events: list[tuple[float, str, str]] = []

    def run(self, line: str) -> int:
        """Show a prompt with the line, run it in bash, and return its exit code."""
        if self.events:
            self._skipped = self._now() - self.events[-1][0] - BETWEEN + self._skipped
            self._record("o", "\r\n")
        self._record("m", line)
        self._record("o", f"$ {line}\r\n")
        main, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
        with subprocess.Popen(
            ["bash", "-c", line],
            cwd=self._directory,
            env=self._environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        ) as process:
            os.close(terminal)
            for output in read_until_closed(main):
                self._record("o", output)
            return process.wait(60)

    def save(self, path: Path) -> None:
        """Write the recording."""
        header = {"version": 2, "width": COLUMNS, "height": ROWS}
        lines = [json.dumps(header), *(json.dumps(event) for event in self.events)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _now(self) -> float:
        return time.monotonic() - self._start - self._skipped

    def _record(self, code: str, data: str) -> None:
        self.events.append((round(self._now(), 3), code, data))


def read_until_closed(terminal: int) -> Iterator[str]:
    """The output of a terminal until its programs have ended."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        try:
            output = os.read(terminal, 1 << 16)
        except OSError:  # EIO: the last program has closed it
            break
        yield decoder.decode(output)
    os.close(terminal)


def test_recording(space: Space, tmp_path: Path) -> None:
    body = yaml.safe_load((ROOT / "examples" / "gpt" / "queue.yaml").read_text())
    body["spec"] |= {"image": space.cluster.trainer, "reliability": {"restartPolicy": "Never"}}
    space.apply(body)
    project = tmp_path / "my-project"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    session = Session(project, environment(space, tmp_path))
    assert session.run(FIRST) == 0
    assert session.run(EDIT) == 0
    assert session.run(SECOND) == 0
    space.wait_phase("shards", "Failed")
    for line in EXPLAIN:
        session.run(line)
    session.save(RECORDING)


def environment(space: Space, directory: Path) -> dict[str, str]:
    """With a kubeconfig whose current namespace is that of the test."""
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_bytes(space.cluster.kubeconfig.read_bytes())
    names = {**space.cluster.environment, "KUBECONFIG": str(kubeconfig)}
    names["XDG_STATE_HOME"] = str(directory / "state")
    select = ["kubectl", "config", "set-context", "--current", "--namespace", space.name]
    subprocess.run(select, env=names, check=True, capture_output=True)
    return names
