"""The lines of a job's status."""

from typing import Any

import msgspec

from kubectl_torchrun.cluster.slices import JobSlice
from kubectl_torchrun.cluster.summary import status_lines


def test_each_end_says_what_ended() -> None:
    end = {"endTime": "2026-01-02T03:04:05Z", "message": "m"}
    ends: list[dict[str, Any]] = [
        {**end, "number": 1, "round": 2},
        {**end, "number": 1},
    ]
    job = msgspec.convert({"status": {"phase": "Queued", "attempts": ends}}, JobSlice)
    lines = [line.strip().removesuffix(" ended at 03:04:05 UTC: m") for line in status_lines(job)]
    assert lines[-2:] == ["attempt 1, round 2", "attempt 1"]
