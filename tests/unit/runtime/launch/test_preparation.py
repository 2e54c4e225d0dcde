"""A node that still prepares a round gives it up at once: none of its ranks runs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.gang.messages import StartRound, StopRound
from torchrun_runtime.launch.preparation import RoundPreparation
from torchrun_runtime.launch.reload import Reload
from torchrun_runtime.launch.settings import from_environment
from unit.runtime.launch.gang.test_gang import Gang
from unit.runtime.launching import PYTHONS, Launched
from unit.runtime.serving import publish

pytestmark = pytest.mark.long  # processes


class Nodes:
    """Two nodes, each with a claim of its own."""

    def __init__(self, python: str, directory: Path) -> None:
        self.gang = Gang(python, directory, 2)
        self.held: list[Held] = []
        self.claims = [launcher.directory / "claim" for launcher in self.gang.launchers]

    def publish(self, program: str) -> None:
        for claim in self.claims:
            publish(claim, {"train.sh": program.encode()})

    def annotate(self, revision: int) -> None:
        self.gang.annotate(start="1", revision=str(revision))

    def start(self) -> list[Launched]:
        return [
            self.gang.start_node(
                node,
                ". ./train.sh",
                TORCHRUN_WORKSPACE_SOURCE=str(self.claims[node]),
                TORCHRUN_WORKSPACE_TARGET=str(self.gang.launchers[node].directory / "app"),
            )
            for node in range(2)
        ]

    def hold(self, revision: int) -> "Held":
        self.held.append(Held(self.claims[1] / "revisions" / str(revision) / "manifest"))
        return self.held[-1]

    def close(self) -> None:
        for launcher in self.gang.launchers:
            launcher.clear()
        for held in self.held:
            held.close()


class Held:
    """A manifest on storage that does not respond."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self._content = manifest.read_bytes()
        manifest.unlink()
        os.mkfifo(manifest)

    def await_reader(self) -> None:
        """Return once a launcher reads it."""
        self._writer = self._manifest.open("wb", buffering=0)

    def release(self) -> None:
        self._writer.write(self._content)
        self._writer.close()

    def close(self) -> None:
        self._writer.close()


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(request.param, tmp_path)
    yield nodes
    nodes.close()


ONE, TWO, SIX = (f"echo {name} $TORCHRUN_ROUND; exec sleep 1000" for name in ("one", "two", "six"))
FAILS_FIRST = """
echo two $TORCHRUN_ROUND
[ $NODE_RANK$TORCHRUN_ROUND = 01 ] && exit 3
exec sleep 1000
"""


def start_held(nodes: Nodes, newer: str) -> tuple[list[Launched], Held]:
    """Both nodes have run revision 1, and node 1 still copies the newer one."""
    nodes.publish(ONE)
    nodes.annotate(1)
    running = nodes.start()
    assert [launched.line() for launched in running] == ["one 0", "one 0"]
    nodes.publish(newer)
    held = nodes.hold(2)
    nodes.annotate(2)
    assert running[0].line() == "two 1"
    held.await_reader()
    return running, held


def test_an_edit_during_a_long_copy_starts_the_next_round(nodes: Nodes) -> None:
    running, held = start_held(nodes, TWO)
    nodes.publish(SIX)
    nodes.annotate(3)
    assert running[0].line() == "six 2", "node 1 has no ranks, and the others do not wait for it"
    held.release()
    assert running[1].line() == "six 2"
    for launched in running:
        launched.stop()
    ends = [launched.end() for launched in running]
    assert [end.exit_code for end in ends] == [143, 143]
    assert "round 1 does not start on this node: there is newer code" in ends[1].err


def test_a_failure_during_a_long_copy_starts_the_next_round(nodes: Nodes) -> None:
    running, held = start_held(nodes, FAILS_FIRST)
    assert running[0].line() == "two 2"
    held.release()
    assert running[1].line() == "two 2"


def test_a_copy_that_hangs_does_not_hold_up_the_end_of_the_pod(nodes: Nodes) -> None:
    running, _ = start_held(nodes, TWO)
    running[1].stop()
    end = running[1].end()
    assert (end.exit_code, end.message["reason"]) == (143, "Stopped")


class Resolver:
    """DNS that does not respond at first."""

    def __init__(self) -> None:
        self.is_asked, self.responds = threading.Event(), threading.Event()
        self.names: list[str] = []

    def getaddrinfo(self, host: str, port: None) -> list[str]:
        self.is_asked.set()
        self.responds.wait()
        return [host] if host in self.names else []


def test_the_next_round_waits_again_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # restored at the end
    monkeypatch.setattr("torchrun_runtime.launch.preparation.socket", resolver := Resolver())
    directory = tmp_path / "work"
    environment = {
        "TORCHRUN_COMMAND": '"true"',
        "TORCHRUN_RESOLVE_WAIT_SECONDS": "0",
        "TORCHRUN_WORKING_DIR": str(directory),
        "PET_MASTER_ADDR": "node-0",
    }
    settings = from_environment(environment)
    preparation = RoundPreparation(settings, "train.py", Reload(None, "", 0.0))
    stops = [StopRound(0), StopRound(1)]
    asked = resolver.is_asked
    assert preparation.run(StartRound(0), lambda: stops[0] if asked.is_set() else None) == stops[0]
    assert preparation.run(StartRound(1), lambda: stops[1]) == stops[1]
    resolver.responds.set()
    with pytest.raises(LaunchError, match="node-0 did not resolve"):
        preparation.run(StartRound(2), lambda: None)
    resolver.names.append("node-0")
    with pytest.raises(LaunchError, match="Cannot enter the working directory"):
        preparation.run(StartRound(3), lambda: None)
    (directory / "src").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"has no file train.py\.$"):
        preparation.run(StartRound(4), lambda: None)
    (directory / "src" / "train.py").touch()
    with pytest.raises(LaunchError, match=r"Did you mean src/train.py\?"):
        preparation.run(StartRound(5), lambda: None)
    (directory / "train.py").touch()
    assert preparation.run(StartRound(6), lambda: None) is None
    assert Path.cwd() == directory
