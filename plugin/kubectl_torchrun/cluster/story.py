"""What a job's status says of its life, in lines."""

from datetime import datetime

from kubectl_torchrun.cluster.slices import Job


def story(job: Job) -> list[str]:
    """What the status says, a line each."""
    status = job.status
    lines = [f"{job.metadata.name}: {status.phase or 'new'}"]
    if status.reason:
        lines.append(f"  {status.reason}: {status.message}")
    lines += [
        f"  {condition.type} is {condition.status}: {condition.message}"
        for condition in status.conditions
        if condition.status != "True" and condition.message and condition.reason != status.reason
    ]
    if status.attempts:
        lines.append(f"  restarts: {status.restarts} counted, {status.disruptions} not counted")
    lines += [
        f"  attempt {attempt.number} ended {_clock(attempt.end_time)}: {attempt.message}"
        for attempt in status.attempts
    ]
    return [part for line in lines for part in line.replace("\n", "\n    ").split("\n")]


def _clock(time: datetime | None) -> str:
    return f"{time:%H:%M:%S} UTC" if time else "at an unknown time"
