"""The lines of a job's status."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.cluster.summary import status_lines


def test_the_network_and_what_is_wrong_with_it() -> None:
    status = {
        "phase": "Running",
        "conditions": [
            {"type": "SlowNetwork", "status": "True", "reason": "A", "message": "Node 7 is slow."},
            {"type": "Scheduled", "status": "True", "reason": "B", "message": "All pods are."},
        ],
        "network": [
            {"transport": "IB", "nodes": 7},
            {"transport": "Socket", "device": "eth0", "nodes": 1, "firstNode": 7},
        ],
    }
    assert status_lines(msgspec.convert({"status": status}, JobSlice))[1:] == [
        "  SlowNetwork is True: Node 7 is slow.",
        "  NCCL uses IB on 7 nodes, Socket over eth0 on 1 node",
    ]


def test_the_last_checkpoint_has_its_age() -> None:
    time = (datetime.now(UTC) - timedelta(seconds=125)).isoformat()
    last = {"step": 1200, "path": "/checkpoints/step-1200", "time": time}
    job = msgspec.convert({"status": {"phase": "Running", "lastCheckpoint": last}}, JobSlice)
    (line,) = status_lines(job)[1:]
    assert line.startswith("  last checkpoint: step 1200 (2m")
    assert line.endswith("s ago) /checkpoints/step-1200")


def test_each_end_says_what_ended() -> None:
    end = {"endTime": "2026-01-02T03:04:05Z", "message": "m"}
    ends: list[dict[str, Any]] = [
        {**end, "number": 1, "round": 2},
        {**end, "number": 1},
    ]
    job = msgspec.convert({"status": {"phase": "Queued", "attempts": ends}}, JobSlice)
    lines = [line.strip().removesuffix(" ended at 03:04:05 UTC: m") for line in status_lines(job)]
    assert lines[-2:] == ["attempt 1, round 2", "attempt 1"]
