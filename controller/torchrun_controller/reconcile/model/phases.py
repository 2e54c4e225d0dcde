"""The states of a job, the phase and condition of each, and the phases that may follow.

For each state the table also says whether the job keeps its admission and its pods, and whether the
deadline counts the time. A phase sums up the conditions, never the other way round. docs/phases.md
is generated from these tables; the steps of `job/steps.py` say which of them leads where.
"""

from enum import Enum

from msgspec import Struct

from torchrun_api.kinds.meta import ConditionStatus
from torchrun_api.kinds.status import PHASES, TERMINAL, Phase


class State(Enum):
    """The state of a job as its objects show it; the value is the text in the docs."""

    GANG_SUCCEEDED = "all pods have succeeded"
    DEADLINE_EXCEEDED = "the job has exceeded its deadline"
    SUSPENDING = "the job is suspended and its pods are terminating"
    SUSPENDED = "the job is suspended and nothing runs"
    PREEMPTING = "the gang is preempted and its pods are terminating"
    PREEMPTED = "the gang is preempted and nothing runs"
    GANG_FAILED = "a pod has failed and no further attempt is allowed"
    START_TIMED_OUT = "the gang could not start in time and its pods are terminating"
    START_POSTPONED = "the gang could not start in time and the next one waits"
    BACKING_OFF = "a pod has failed and the next attempt waits for its back-off"
    GANG_RUNNING = "all pods run or have succeeded"
    GANG_STARTING = "the Indexed Job exists, but not all pods run yet"
    GANG_SUSPENDED = "someone else has suspended the Indexed Job"
    QUEUE_MISSING = "the queue does not exist"
    SPEC_INVALID = "the specs of job and queue contradict each other"
    DEPENDENCY_FAILED = "a job in dependsOn has failed"
    DEPENDENCY_WAITING = "a job in dependsOn has not reached the required state"
    CLAIM_ENDING = "a PVC of the gang is being deleted"
    SCHEDULER_MISSING = "the requested gang scheduler is not installed"
    NAME_TAKEN = "an object that does not belong to the job has a name that the job needs"
    REJECTED = "the API server has refused an object of the job"
    SYNC_TIMED_OUT = "the workspace was not ready in time"
    WORKSPACE_REFUSED = "the workspace source cannot be used until it is corrected"
    WORKSPACE_SYNCING = "the workspace is not ready"
    PREEMPTED_WAITING = "the job was preempted and waits for admission again"
    ADMISSION_WAITING = "the job waits for admission by its queue"
    RECORDING_UNFENCED = "the status records pods that may still run, before the gang is created"
    NODES_AWAITED = "the machines are not read yet, so a lost one would not be noticed"
    READY = "everything is ready and the gang is being created"


class Hold(Enum):
    """How long an admitted job keeps its admission; the value is the text in the docs."""

    KEPT = "kept"
    # A gang returns it only if it waits for somebody's action (BLOCKED_REASONS).
    FOR_A_WHILE = "kept for 30 min"
    RETURNED = "returned at once"
    RELEASED = "released by the queue, once no pod runs"  # by the phase: the job wants no gang


class Pods(Enum):
    """What a state means for the pods of the gang; the value is the text in the docs."""

    KEPT = "kept"
    ENDED = "ended"
    NONE = "none"


class Row(Struct, frozen=True):
    """The phase of a state (None: unchanged), and the condition with its reason and message.

    `admission` and `pods` are what the job keeps. `runs`: the deadline counts the time. None of
    them has a default, so that a new state needs an answer.
    """

    phase: Phase | None
    condition: str
    status: ConditionStatus
    admission: Hold
    pods: Pods
    runs: bool


ROWS: dict[State, Row] = {
    State.GANG_SUCCEEDED: Row(
        "Succeeded", "Complete", "True", Hold.RELEASED, Pods.ENDED, runs=False
    ),
    State.DEADLINE_EXCEEDED: Row(
        "TimedOut", "Failed", "True", Hold.RELEASED, Pods.ENDED, runs=False
    ),
    State.SUSPENDING: Row(None, "Suspended", "False", Hold.RELEASED, Pods.ENDED, runs=False),
    State.SUSPENDED: Row("Suspended", "Suspended", "True", Hold.RELEASED, Pods.NONE, runs=False),
    State.PREEMPTING: Row("Preempted", "Running", "False", Hold.RELEASED, Pods.ENDED, runs=False),
    State.PREEMPTED: Row("Preempted", "Running", "False", Hold.RELEASED, Pods.NONE, runs=False),
    State.GANG_FAILED: Row("Failed", "Failed", "True", Hold.RELEASED, Pods.ENDED, runs=False),
    State.START_TIMED_OUT: Row("Queued", "Running", "False", Hold.KEPT, Pods.ENDED, runs=False),
    State.START_POSTPONED: Row("Queued", "Running", "False", Hold.RETURNED, Pods.NONE, runs=False),
    State.BACKING_OFF: Row("Queued", "Running", "False", Hold.KEPT, Pods.ENDED, runs=False),
    State.GANG_RUNNING: Row("Running", "Running", "True", Hold.KEPT, Pods.KEPT, runs=True),
    State.GANG_STARTING: Row("Queued", "Running", "False", Hold.FOR_A_WHILE, Pods.KEPT, runs=False),
    State.GANG_SUSPENDED: Row("Preempted", "Running", "False", Hold.KEPT, Pods.ENDED, runs=False),
    State.QUEUE_MISSING: Row(
        "Pending", "QueueReady", "False", Hold.RETURNED, Pods.NONE, runs=False
    ),
    State.SPEC_INVALID: Row("Pending", "Running", "False", Hold.RETURNED, Pods.NONE, runs=False),
    State.DEPENDENCY_FAILED: Row("Failed", "Failed", "True", Hold.RELEASED, Pods.NONE, runs=False),
    State.DEPENDENCY_WAITING: Row(
        "Queued", "DependenciesMet", "False", Hold.RETURNED, Pods.NONE, runs=False
    ),
    State.CLAIM_ENDING: Row("Queued", "Running", "False", Hold.FOR_A_WHILE, Pods.NONE, runs=False),
    State.SCHEDULER_MISSING: Row(
        "Pending", "Running", "False", Hold.RETURNED, Pods.NONE, runs=False
    ),
    State.NAME_TAKEN: Row("Pending", "Running", "False", Hold.RETURNED, Pods.KEPT, runs=False),
    State.REJECTED: Row("Pending", "Running", "False", Hold.RETURNED, Pods.KEPT, runs=False),
    State.SYNC_TIMED_OUT: Row("Failed", "Failed", "True", Hold.RELEASED, Pods.NONE, runs=False),
    State.WORKSPACE_REFUSED: Row(
        "Syncing", "WorkspaceReady", "False", Hold.RETURNED, Pods.NONE, runs=False
    ),
    State.WORKSPACE_SYNCING: Row(
        "Syncing", "WorkspaceReady", "False", Hold.FOR_A_WHILE, Pods.NONE, runs=False
    ),
    State.PREEMPTED_WAITING: Row("Preempted", "Running", "False", Hold.KEPT, Pods.NONE, runs=False),
    State.ADMISSION_WAITING: Row("Queued", "Running", "False", Hold.KEPT, Pods.NONE, runs=False),
    State.RECORDING_UNFENCED: Row("Queued", "Running", "False", Hold.KEPT, Pods.NONE, runs=False),
    State.NODES_AWAITED: Row("Queued", "Running", "False", Hold.FOR_A_WHILE, Pods.NONE, runs=False),
    State.READY: Row("Queued", "Running", "False", Hold.KEPT, Pods.NONE, runs=False),
}

# The phases of a job with a gang.
GANG_PHASES = frozenset(
    ROWS[state].phase for state in (State.GANG_STARTING, State.GANG_RUNNING, State.GANG_SUSPENDED)
)

# The phases whose time is running time.
RUNNING_PHASES = frozenset(row.phase for row in ROWS.values() if row.runs)

# The phases that may follow a phase in the status. A gang is created in Queued, so no other phase
# without a gang leads to Running. A job with a gang continues as from Queued, too: if the
# controller is killed before it writes the status of the new gang, or while the Service of the
# gang is refused, which is Pending.
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "Pending": frozenset({"Syncing", "Queued", "Suspended", "Preempted", "Failed"}),
    "Syncing": frozenset({"Pending", "Queued", "Suspended", "Preempted", "Failed"}),
    "Queued": frozenset(PHASES) - {"Queued", "TimedOut"},
    "Running": frozenset(PHASES) - {"Running"},
    "Suspended": frozenset(PHASES) - {"Suspended", "Running", "TimedOut"},
    "Preempted": frozenset(PHASES) - {"Preempted", "TimedOut"},
    **{phase: frozenset() for phase in sorted(TERMINAL)},
}
