"""What a user reads while a job waits and runs."""

import io

import msgspec
import pytest

from kubectl_torchrun.cluster import narrator
from kubectl_torchrun.cluster.job_watch import JobState
from kubectl_torchrun.cluster.narrator import NO_CONTROLLER, Narrator
from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.terminal import Display

# At this second, the job has this phase, reason, message and attempt.
Seen = tuple[int, str, str, str, int]
CLAIM = ("ClaimPending", "SyncPodStarting", "Unschedulable", "VolumeNotMounted")
CASES: dict[str, tuple[list[Seen], list[str]]] = {
    "reasons that follow each other fast": (
        [
            *((at, "Syncing", reason, "PVC w", 0) for at, reason in enumerate(CLAIM)),
            (4, "Queued", "PodsStarting", "0 of 2", 0),
            (5, "Queued", "PodsStarting", "1 of 2", 0),
            (6, "Running", "WorkersRunning", "2 of 2", 0),
            (90, "Succeeded", "Completed", "", 0),
        ],
        [
            "Syncing   ClaimPending: PVC w",
            "Queued    PodsStarting: 0 of 2",
            "Running   WorkersRunning: 2 of 2",
            "Succeeded Completed",
        ],
    ),
    "a reason that lasts, with messages that count": (
        [
            (0, "Queued", "PodsStarting", "0 of 2", 0),
            *((at, "Queued", "Unschedulable", f"0/{at // 6} nodes", 0) for at in range(6, 50)),
        ],
        ["Queued    PodsStarting: 0 of 2", "Queued    Unschedulable: 0/1 nodes"],
    ),
    "each restart of a running job, and each attempt": (
        [
            (0, "Running", "WorkersRunning", "2 of 2", 0),
            (1, "Running", "WorkersRunning", "1 restart in the same pods", 0),
            (7, "Running", "WorkersRunning", "1 restart, 2 of 2 completed", 0),
            (2, "Queued", "BackOff", "in 10 s", 1),
            (3, "Running", "WorkersRunning", "2 of 2", 1),
        ],
        [
            "Running   WorkersRunning: 2 of 2",
            "Running   WorkersRunning: 1 restart in the same pods",
            "Queued    attempt 1: BackOff: in 10 s",
            "Running   WorkersRunning: 2 of 2",
        ],
    ),
    "no controller": ([(at, "", "", "", 0) for at in range(20)], [f"New       {NO_CONTROLLER}"]),
    "a quiet reason": (
        [(at, "Syncing", "WaitingForUpload", "m", 0) for at in range(4)]
        + [(9, "Syncing", "Fetching", "m", 0)],
        ["Syncing   Fetching: m"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_line_for_each_phase(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen, expected = CASES[name]
    now = 0.0
    monkeypatch.setattr(narrator.anyio, "current_time", lambda: now)
    monkeypatch.setattr(narrator.anyio, "Event", lambda: None)
    err = io.StringIO()
    state = JobState()
    told = Narrator(state, Display(io.StringIO(), err), frozenset({"WaitingForUpload"}))
    for at, phase, reason, message, attempt in seen:
        now = float(at)
        status = {"phase": phase, "reason": reason, "message": message, "attempt": attempt}
        status["restartsInPlace"] = int("restart" in message)
        state.job = msgspec.convert({"status": status}, JobSlice)
        told.catch_up()
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("Still")]
    assert lines == expected
