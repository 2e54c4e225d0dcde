"""Status of a TorchrunJob: how far the run is, and why."""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from torchrun_api.admission import Admission, MetDependency
from torchrun_api.meta import Condition, Time, Wire
from torchrun_api.reliability import QueuePolicy
from torchrun_api.schema import BY_NAME, BY_TYPE

Phase = Literal[
    "Pending",
    "Syncing",
    "Queued",
    "Running",
    "Succeeded",
    "Failed",
    "Suspended",
    "TimedOut",
    "Preempted",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# A job in one of these keeps it for ever.
TERMINAL: frozenset[Phase] = frozenset({"Succeeded", "Failed", "TimedOut"})

# No job comes near; who writes more in a status, which names the next gang, is refused.
# The largest count of gangs; counters stop there.
MOST_GANGS = 1_000_000
Gangs = Annotated[int, Meta(ge=0, le=MOST_GANGS)]


class WorkersStatus(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Workers of the present attempt, counted from their pods."""

    pending: Annotated[int, Meta(description="Not started yet.")] = 0
    ready: Annotated[int, Meta(description="Started, and their command runs.")] = 0
    running: Annotated[int, Meta(description="Started, ready or not.")] = 0
    failed: Annotated[int, Meta(description="Ended with an error.")] = 0
    succeeded: Annotated[int, Meta(description="Ended well.")] = 0


class LastFailure(Wire, frozen=True, kw_only=True):
    """The first failure of the last gang that failed: the cause, not what it dragged along."""

    node: Annotated[str, Meta(description="Node on which it happened.")] = ""
    rank: Annotated[int | None, Meta(description="Global rank that failed.")] = None
    exit_code: Annotated[int | None, Meta(description="Exit code of that rank.")] = None
    signal: Annotated[int | None, Meta(description="Signal that ended that rank.")] = None
    reason: Annotated[str, Meta(description="Kind of failure, in one word.")] = ""
    message: Annotated[str, Meta(description="Its last line, or what to do.")] = ""
    time: Annotated[Time | None, Meta(description="When it happened.")] = None


class Attempt(Wire, frozen=True, kw_only=True):
    """A gang that ended, and why."""

    number: Annotated[Gangs, Meta(description="Number of the attempt, from 0.")] = 0
    node: Annotated[str, Meta(description="Node of the failure that ended it.")] = ""
    start_time: Annotated[Time | None, Meta(description="When it was created.")] = None
    end_time: Annotated[Time | None, Meta(description="When it was given up.")] = None
    running_seconds: Annotated[
        int, Meta(ge=0, le=10_000_000_000, description="For how long all its workers ran.")
    ] = 0
    counted: Annotated[bool, Meta(description="Whether maxRestarts counts its end.")] = False
    reason: Annotated[str, Meta(description="Why it ended, in one word.")] = ""
    message: Annotated[str, Meta(description="Why it ended.")] = ""


class Progress(Wire, frozen=True, kw_only=True):
    """How far the training is, as rank 0 says by torchrun_progress.report."""

    step: Annotated[int | None, Meta(description="Steps done.")] = None
    total_steps: Annotated[int | None, Meta(description="Steps in all.")] = None
    loss: Annotated[float | None, Meta(description="Last loss; left out if not finite.")] = None
    samples_per_second: Annotated[float | None, Meta(description="Of the whole job.")] = None
    time: Annotated[Time | None, Meta(description="When it was reported.")] = None


class UnfencedWorker(Wire, frozen=True, kw_only=True):
    """A worker on a lost node of which nobody knows whether it still runs."""

    attempt: Annotated[
        Gangs | None,
        Meta(description="Its attempt; unset for a worker of an earlier job of this name."),
    ] = None
    index: Annotated[int, Meta(ge=0, le=10000, description="Its index in the gang.")] = 0
    node: Annotated[str, Meta(description="Its node.")] = ""
    since: Annotated[Time | None, Meta(description="Since when the node is lost.")] = None
    unproven: Annotated[
        bool, Meta(description="It left no proof that it watches for newer gangs.")
    ] = False


class TorchrunJobStatus(Wire, frozen=True, kw_only=True):
    """How far the run is and why it waits or died."""

    phase: Annotated[Phase | None, Meta(description="Sums up the conditions.")] = None
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="metav1 conditions; each message says what to do.",
            extra_json_schema=BY_TYPE,
        ),
    ] = ()
    observed_generation: Annotated[
        int, Meta(description="Generation of the spec that this status speaks of.")
    ] = 0
    reason: Annotated[str, Meta(description="Of the condition that matters now.")] = ""
    message: Annotated[str, Meta(description="Of the condition that matters now.")] = ""
    num_nodes: Annotated[int | None, Meta(description="Nodes of the present attempt.")] = None
    gpus: Annotated[int | None, Meta(description="GPUs of those nodes together.")] = None
    workers: WorkersStatus | None = None
    workers_status: Annotated[str, Meta(description='The counts in words, as "3/4 ready".')] = ""
    attempt: Annotated[Gangs, Meta(description="Number of the present gang, from 0.")] = 0
    restarts: Annotated[
        Gangs,
        Meta(description="Gangs that failed and that maxRestarts counts; a new one follows each."),
    ] = 0
    disruptions: Annotated[
        Gangs,
        Meta(description="Gangs that ended by disruptions and ignored failures, not counted."),
    ] = 0
    running_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000_000,
            description="Running time of the gangs before the present one.",
        ),
    ] = 0
    attempts: Annotated[
        tuple[Attempt, ...], Meta(max_length=5, description="The last gangs that ended.")
    ] = ()
    unfenced: Annotated[
        tuple[UnfencedWorker, ...],
        Meta(description="Workers on lost nodes that may still run and write checkpoints."),
    ] = ()
    worker_nodes: Annotated[
        tuple[str, ...],
        Meta(
            max_length=10000,
            description="Nodes of the present gang's workers that may run their command, by index; "
            "empty for others, and for those in unfenced.",
        ),
    ] = ()
    avoided_nodes: Annotated[
        tuple[str, ...],
        Meta(description="Nodes that the next gang avoids where it can: they failed twice."),
    ] = ()
    checkpoint_nodes: Annotated[
        tuple[str, ...],
        Meta(
            max_length=1024,
            description="Nodes that have the checkpoints of the last gang, where they stay on "
            "nodes: the next gang prefers these.",
        ),
    ] = ()
    selector: Annotated[str, Meta(description="Label selector of the workers, for scaling.")] = ""
    workspace_revision: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000_000_000,
            description="The revision of the workspace that all workers of the present gang have "
            "been told to run, from 1; kubectl torchrun sync makes another.",
        ),
    ] = 0
    workspace_commit: Annotated[
        str,
        Meta(
            description="What the workspace was made of: git's commit, or for s3 a digest over "
            "the objects' names, sizes and ETags."
        ),
    ] = ""
    start_time: Annotated[Time | None, Meta(description="When all workers first ran.")] = None
    queue_policy: Annotated[
        QueuePolicy | None,
        Meta(
            description="What the queue lent to the job when its first gang was created: this "
            "holds to the job's end, whatever becomes of the queue. The job's own spec goes first."
        ),
    ] = None
    sync_start_time: Annotated[
        Time | None,
        Meta(description="When the preparation of the workspace began that is under way."),
    ] = None
    completion_time: Annotated[
        Time | None, Meta(description="When the job succeeded or failed for good.")
    ] = None
    last_failure: LastFailure | None = None
    progress: Progress | None = None
    dependencies_met: Annotated[
        tuple[MetDependency, ...],
        Meta(
            max_length=64,
            description="Those of spec.dependsOn that have been met.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    admission: Admission | None = None
    queue_position: Annotated[
        int | None, Meta(description="Place in its queue's line while it is not admitted, from 1.")
    ] = None
