"""A recording of a real run: the replay decides what the controller has applied."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.controller_process import IMAGE, PATIENCE, ControllerProcess, eventually
from integration.team import WORKSPACE, Team
from torchrun_cluster import LocalCluster

LIFE = ["Pending", "Syncing", "Queued", "Running", "Succeeded"]
SOURCES = 9  # six kinds of job objects, events, nodes and discovery
STATUS_FIELDS = ("phase", "reason", "message", "startTime", "observedGeneration")
REPLAY = (sys.executable, "-m", "torchrun_controller.replay")


@contextmanager
def recording(cluster: LocalCluster, team: Team, path: Path) -> Iterator[None]:
    reading = ("--kubeconfig", str(cluster.kubeconfig), "--namespaces", team.name)
    with subprocess.Popen([*REPLAY, "record", str(path), *reading]) as process:
        try:
            eventually("a list of each kind, and discovery", lambda: len(sources(path)) == SOURCES)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


def path_lines(path: Path) -> list[bytes]:
    """The complete lines; the last one may be partly written."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def sources(path: Path) -> set[str]:
    """The listed kinds, streamed or in pages; 1.33 does not stream lists."""
    _head, *changes = path_lines(path) or [b""]
    return {line["source"] for line in map(json.loads, changes)}


def await_line(path: Path, *parts: bytes) -> None:
    """Wait until one line of the recording has all parts."""
    eventually(
        f"{parts} in the recording",
        lambda: any(all(part in line for part in parts) for line in path_lines(path)),
    )


@contextmanager
def recorded_before_the_reaction(
    controller: ControllerProcess, path: Path, *parts: bytes
) -> Iterator[None]:
    """Pause the controller until the recording has what the block changes.

    Each kind has its own watch, so the recording may have the reaction first.
    """
    controller.send(signal.SIGSTOP)
    try:
        yield
        await_line(path, *parts)
    finally:
        controller.send(signal.SIGCONT)


def replay(path: Path, **environ: str) -> list[dict[str, Any]]:
    answer = subprocess.run(
        [*REPLAY, "plans", str(path), "--json", "--runtime-image", IMAGE],
        env={**os.environ, **environ},
        capture_output=True,
        check=True,
    )
    assert answer.stderr == b""
    return [json.loads(line) for line in answer.stdout.splitlines()]


def is_part(planned: Any, live: Any) -> bool:
    """Whether the stored object has all applied fields; the API server adds defaults."""
    if isinstance(planned, dict):
        return isinstance(live, dict) and all(
            name in live and is_part(part, live[name]) for name, part in planned.items()
        )
    if isinstance(planned, list):
        return len(planned) == len(live) and all(map(is_part, planned, live))
    return bool(planned == live)


def test_a_replay_repeats_the_recorded_decisions(
    crds: LocalCluster, team: Team, team_controller: ControllerProcess, tmp_path: Path
) -> None:
    tape = tmp_path / "run"
    with recording(crds, team, tape):
        with recorded_before_the_reaction(team_controller, tape, b"torchrunjobs", b'"train"'):
            team.submit("train", volumes=WORKSPACE)
        team.reaches("train", "Syncing")
        team.has(f"{team.core}/pods/train-sync-0")
        succeeded = (b'"train-sync-0"', b'"phase":"Succeeded"')
        with recorded_before_the_reaction(team_controller, tape, *succeeded):
            team.pod_becomes("train-sync-0", "Succeeded")
        workers = team.workers("train")
        await_line(tape, b"jobs.batch", b'"train"')
        *others, last = workers
        for phase in ("Running", "Succeeded"):
            for worker in others:
                team.pod_becomes(worker, phase)
            words = (last.encode(), f'"phase":"{phase}"'.encode())
            with recorded_before_the_reaction(team_controller, tape, *words):
                team.pod_becomes(last, phase)
            team.reaches("train", phase)
        final = team.reaches("train", "Succeeded")
        await_line(tape, b"torchrunjobs", b'"phase":"Succeeded"')
    decisions = replay(tape)
    assert decisions == replay(tape, PYTHONHASHSEED="7")

    (child,) = team.api.items(f"{team.batch}/jobs")
    (service,) = team.api.items(f"{team.core}/services", "torchrun-job-name=train")
    (claim,) = team.api.items(f"{team.core}/persistentvolumeclaims")
    planned = {
        f"{intent['resource']}/{intent['name']}": intent["body"]
        for decision in reversed(decisions)
        for intent in decision.get("apply", ())
    }
    for resource, live in (
        ("jobs.batch", child),
        ("services", service),
        ("persistentvolumeclaims", claim),
    ):
        body = planned[f"{resource}/{live['metadata']['name']}"]
        assert is_part(body["spec"], live["spec"])
        assert is_part(body["metadata"]["labels"], live["metadata"]["labels"])
    phases = [decision["status"]["phase"] for decision in decisions if "status" in decision]
    # A job that lacks nothing leaves Pending at once.
    assert list(dict.fromkeys(phases)) in (LIFE, LIFE[1:])
    status = next(d["status"] for d in reversed(decisions) if "status" in d)
    assert [status[name] for name in STATUS_FIELDS] == [final[name] for name in STATUS_FIELDS]
    assert "apply" not in decisions[-1]
    assert "status" not in decisions[-1]
