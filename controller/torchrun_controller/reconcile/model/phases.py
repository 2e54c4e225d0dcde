"""The states that a job may be in, the phase and condition of each, and the phases that follow.

A phase sums up the conditions, never the other way round. The picture in docs/phases.md is drawn
from TRANSITIONS; the steps of `job/steps.py` say which of them leads where.
"""

from enum import Enum

from msgspec import Struct

from torchrun_api.meta import ConditionStatus
from torchrun_api.status import PHASES, TERMINAL, Phase


class State(Enum):
    """What the objects of a job show, in the words of the docs."""

    GANG_SUCCEEDED = "every worker succeeded"
    DEADLINE_EXCEEDED = "the job has run for longer than it may"
    SUSPENDING = "a pause is asked for and pods still end"
    SUSPENDED = "a pause is asked for and nothing runs"
    PREEMPTING = "the gang gives way to another job, and its pods still end"
    PREEMPTED = "the gang has given way to another job"
    GANG_FAILED = "a worker failed, and no new gang may follow"
    BACKING_OFF = "a worker failed, and a new gang follows after a delay"
    GANG_RUNNING = "every worker runs or has succeeded"
    GANG_STARTING = "the child Job is there, not all workers run"
    GANG_SUSPENDED = "the child Job is suspended by somebody else"
    QUEUE_MISSING = "the queue does not exist"
    SPEC_INVALID = "job and queue make no run"
    DEPENDENCY_FAILED = "a job that this one depends on has failed for good"
    DEPENDENCY_WAITING = "a job that this one depends on has not come so far"
    CLAIM_ENDING = "a claim that the gang mounts is being deleted"
    SCHEDULER_MISSING = "the gang scheduler that is asked for is not installed"
    NAME_TAKEN = "a name of ours is held by a foreign object"
    REJECTED = "the API server refused an object of ours"
    SYNC_TIMED_OUT = "the workspace was not ready in time"
    WORKSPACE_REFUSED = "the workspace's source cannot be used until it is mended"
    WORKSPACE_SYNCING = "the workspace is not ready"
    PREEMPTED_WAITING = "nothing is missing but the queue's admission, which another job took"
    ADMISSION_WAITING = "nothing is missing but the queue's admission"
    RECORDING_UNFENCED = "workers that may still run are recorded before the gang is created"
    READY = "nothing is missing: the gang is created"


class Row(Struct, frozen=True):
    """Where a finding leads (None: nowhere), and the condition that carries reason and message."""

    phase: Phase | None
    condition: str
    status: ConditionStatus


ROWS: dict[State, Row] = {
    State.GANG_SUCCEEDED: Row("Succeeded", "Complete", "True"),
    State.DEADLINE_EXCEEDED: Row("TimedOut", "Failed", "True"),
    State.SUSPENDING: Row(None, "Suspended", "False"),
    State.SUSPENDED: Row("Suspended", "Suspended", "True"),
    State.PREEMPTING: Row("Preempted", "Running", "False"),
    State.PREEMPTED: Row("Preempted", "Running", "False"),
    State.GANG_FAILED: Row("Failed", "Failed", "True"),
    State.BACKING_OFF: Row("Queued", "Running", "False"),
    State.GANG_RUNNING: Row("Running", "Running", "True"),
    State.GANG_STARTING: Row("Queued", "Running", "False"),
    State.GANG_SUSPENDED: Row("Preempted", "Running", "False"),
    State.QUEUE_MISSING: Row("Pending", "QueueReady", "False"),
    State.SPEC_INVALID: Row("Pending", "Running", "False"),
    State.DEPENDENCY_FAILED: Row("Failed", "Failed", "True"),
    State.DEPENDENCY_WAITING: Row("Queued", "DependenciesMet", "False"),
    State.CLAIM_ENDING: Row("Queued", "Running", "False"),
    State.SCHEDULER_MISSING: Row("Pending", "Running", "False"),
    State.NAME_TAKEN: Row("Pending", "Running", "False"),
    State.REJECTED: Row("Pending", "Running", "False"),
    State.SYNC_TIMED_OUT: Row("Failed", "Failed", "True"),
    State.WORKSPACE_REFUSED: Row("Syncing", "WorkspaceReady", "False"),
    State.WORKSPACE_SYNCING: Row("Syncing", "WorkspaceReady", "False"),
    State.PREEMPTED_WAITING: Row("Preempted", "Running", "False"),
    State.ADMISSION_WAITING: Row("Queued", "Running", "False"),
    State.RECORDING_UNFENCED: Row("Queued", "Running", "False"),
    State.READY: Row("Queued", "Running", "False"),
}

# From a phase to the next one, as a written status shows it. A gang is created in Queued, so no
# other phase without a gang leads to Running. Where a process was killed after it had created a
# gang, and before it wrote the status, the next one goes on as from Queued.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "Pending": frozenset({"Syncing", "Queued", "Suspended", "Preempted", "Failed"}),
    "Syncing": frozenset({"Pending", "Queued", "Suspended", "Preempted", "Failed"}),
    "Queued": frozenset(PHASES) - {"Queued", "TimedOut"},
    "Running": frozenset(PHASES) - {"Running"},
    "Suspended": frozenset(PHASES) - {"Suspended", "Running", "TimedOut"},
    "Preempted": frozenset(PHASES) - {"Preempted", "TimedOut"},
    **{phase: frozenset() for phase in sorted(TERMINAL)},
}
