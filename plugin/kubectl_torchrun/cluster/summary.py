"""A job's status in lines of text."""

from datetime import datetime

from kubectl_torchrun import output
from kubectl_torchrun.cluster.slices import (
    AttemptSlice,
    CheckpointSlice,
    JobSlice,
    NetworkSlice,
)

_WARNINGS = frozenset({"NotYetSupported", "SlowNetwork"})  # conditions that warn if they are True


def status_lines(job: JobSlice) -> list[str]:
    """Lines: phase, reason, conditions that are not met or warn, NCCL's network, the last
    checkpoint, restarts and earlier attempts.
    """
    status = job.status
    lines = [f"{job.metadata.name}: {status.phase or 'new'}"]
    if status.reason:
        lines.append(f"  {status.reason}: {status.message}")
    lines += [
        f"  {condition.type} is {condition.status}: {condition.message}"
        for condition in status.conditions
        if (condition.status != "True" or condition.type in _WARNINGS)
        and condition.message
        and condition.reason != status.reason
    ]
    if status.network:
        lines.append(f"  NCCL uses {', '.join(map(describe_network, status.network))}")
    if status.last_checkpoint is not None:
        lines.append(f"  last checkpoint: {describe_checkpoint(status.last_checkpoint)}")
    if status.attempts:
        lines.append(f"  restarts: {status.restarts} counted, {status.disruptions} not counted")
    lines += [
        f"  {_name(attempt)} ended at {_clock(attempt.end_time)}: {attempt.message}"
        for attempt in status.attempts
    ]
    return [part for line in lines for part in line.replace("\n", "\n    ").split("\n")]


def describe_network(use: NetworkSlice) -> str:
    """Transport and device, and on how many nodes."""
    name = f"{use.transport} over {use.device}" if use.device else use.transport
    return f"{name} on {use.nodes} {'node' if use.nodes == 1 else 'nodes'}"


def describe_checkpoint(checkpoint: CheckpointSlice) -> str:
    """Step, age and path of a checkpoint."""
    age = f" ({output.age(checkpoint.time)} ago)" if checkpoint.time else ""
    return f"step {checkpoint.step}{age} {checkpoint.path}"


def _name(attempt: AttemptSlice) -> str:
    part = "" if attempt.round is None else f", round {attempt.round}"
    return f"attempt {attempt.number}{part}"


def node_count(job: JobSlice) -> str:
    """The number of nodes in the status, else in the spec, else the GPUs of the spec."""
    nodes = job.status.num_nodes or job.spec.num_nodes
    if nodes is None:
        return f"{job.spec.num_gpus} GPUs" if job.spec.num_gpus else "-"
    return str(nodes)


def _clock(time: datetime | None) -> str:
    return f"{time:%H:%M:%S} UTC" if time else "an unknown time"
