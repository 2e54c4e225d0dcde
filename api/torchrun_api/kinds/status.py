"""Status of a TorchrunJob: how far the run is, and why."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from torchrun_api.kinds.admission import Admission, MetDependency
from torchrun_api.kinds.meta import Condition, Time, Wire
from torchrun_api.kinds.reliability import QueuePolicy
from torchrun_api.kinds.schema import BY_NAME, BY_TYPE, one_of
from torchrun_api.names import MOST_GANGS

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
if TYPE_CHECKING:
    StatusPhase: TypeAlias = Phase
else:
    StatusPhase = Annotated[str, one_of(*PHASES)]
# A job in one of these phases never leaves it.
TERMINAL: frozenset[Phase] = frozenset({"Succeeded", "Failed", "TimedOut"})
UNFINISHED: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase not in TERMINAL)
# A job in one of these phases waits, but not for its user.
WAITING: tuple[Phase, ...] = ("Pending", "Syncing", "Queued", "Preempted")

LONGEST_PATH = 1024  # characters of the path of a checkpoint

# The status names the next gang, so it has this limit too; counters stop there.
Gangs = Annotated[int, Meta(ge=0, le=MOST_GANGS)]


class WorkersStatus(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Counts of the pods of the current attempt."""

    pending: Annotated[int, Meta(description="Pods that have not started.")] = 0
    ready: Annotated[int, Meta(description="Pods whose command runs.")] = 0
    running: Annotated[int, Meta(description="Pods that have started, ready or not.")] = 0
    failed: Annotated[int, Meta(description="Pods that failed.")] = 0
    succeeded: Annotated[int, Meta(description="Pods that succeeded.")] = 0


class LastFailure(Wire, frozen=True, kw_only=True):
    """The root cause of the last failed gang or round: the first failure, not the later ones."""

    node: Annotated[str, Meta(description="Machine of the failure.")] = ""
    rank: Annotated[int | None, Meta(description="Global rank that failed.")] = None
    exit_code: Annotated[int | None, Meta(description="Exit code of that rank.")] = None
    signal: Annotated[int | None, Meta(description="Signal that ended that rank.")] = None
    reason: Annotated[str, Meta(description="Reason of the failure in CamelCase.")] = ""
    message: Annotated[
        str, Meta(description="Last line of output of the failed rank, or what to do.")
    ] = ""
    time: Annotated[Time | None, Meta(description="Time of the failure.")] = None


class Attempt(Wire, frozen=True, kw_only=True):
    """A gang that has ended, or a round of it, and why."""

    number: Annotated[Gangs, Meta(description="Number of the attempt, from 0.")] = 0
    round: Annotated[
        Gangs | None,
        Meta(
            description="Number of the round that failed, if the ranks started again in the same"
            " pods. Unset for the end of the whole attempt."
        ),
    ] = None
    node: Annotated[str, Meta(description="Machine of the failure that ended it.")] = ""
    start_time: Annotated[
        Time | None, Meta(description="Time of creation, or start of the round.")
    ] = None
    end_time: Annotated[Time | None, Meta(description="Time of its end.")] = None
    running_seconds: Annotated[
        int, Meta(ge=0, le=10_000_000_000, description="Time during which all of its pods ran.")
    ] = 0
    step: Annotated[
        int | None,
        Meta(description="Newest step that its ranks reported."),
    ] = None
    checkpoint_step: Annotated[
        int | None,
        Meta(description="Step of the last complete checkpoint of the job at its end."),
    ] = None
    counted: Annotated[bool, Meta(description="Whether its end counts towards maxRestarts.")] = (
        False
    )
    reason: Annotated[str, Meta(description="Reason of its end in CamelCase.")] = ""
    message: Annotated[str, Meta(description="Why it ended.")] = ""


class Progress(Wire, frozen=True, kw_only=True):
    """Training progress, as rank 0 reports it by torchrun_progress.report."""

    step: Annotated[int | None, Meta(description="Completed steps.")] = None
    total_steps: Annotated[int | None, Meta(description="Total number of steps.")] = None
    loss: Annotated[
        float | None,
        Meta(
            description="Last loss, rounded to 4 significant digits. Omitted if it is not finite."
        ),
    ] = None
    samples_per_second: Annotated[
        float | None,
        Meta(description="Throughput of the whole job, rounded to 4 significant digits."),
    ] = None
    steps_per_second: Annotated[
        float | None,
        Meta(
            description="Average rate of the current attempt over about a minute, from the reports "
            "in the status, rounded to 4 significant digits."
        ),
    ] = None
    time: Annotated[Time | None, Meta(description="Time of the report.")] = None


class Checkpoint(Wire, frozen=True, kw_only=True):
    """A complete checkpoint, as the ranks report it by torchrun_progress.checkpoint."""

    step: Annotated[int, Meta(ge=0, le=2**53, description="Steps that it contains.")]
    path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=LONGEST_PATH,
            description="Absolute path in the pods, or a URL, as rank 0 names it.",
        ),
    ]
    time: Annotated[
        Time, Meta(description="Time at which rank 0 had saved it. A newer one has a later time.")
    ]


class NetworkUse(Wire, frozen=True, kw_only=True):
    """A network that NCCL uses on some nodes of the current attempt."""

    transport: Annotated[
        str,
        Meta(
            max_length=40,
            description="Its name in NCCL, for example IB, Socket (TCP) or AWS Libfabric.",
        ),
    ] = ""
    device: Annotated[
        str,
        Meta(
            max_length=40,
            description="The interface of Socket, or the provider of libfabric, such as efa.",
        ),
    ] = ""
    nodes: Annotated[int, Meta(ge=0, le=10000, description="Number of nodes.")] = 0
    first_node: Annotated[int, Meta(ge=0, le=10000, description="Lowest index of them.")] = 0


class UnfencedWorker(Wire, frozen=True, kw_only=True):
    """A pod on a lost machine that may still run."""

    attempt: Annotated[
        Gangs | None,
        Meta(
            description="Number of its attempt. Unset for a pod of an earlier job with this name."
        ),
    ] = None
    index: Annotated[int, Meta(ge=0, le=10000, description="Index of the pod in the gang.")] = 0
    node: Annotated[str, Meta(description="Machine of the pod.")] = ""
    since: Annotated[Time | None, Meta(description="Time since which the machine is lost.")] = None
    unproven: Annotated[
        bool, Meta(description="The pod has not confirmed that it watches for newer gangs.")
    ] = False


class TorchrunJobStatus(Wire, frozen=True, kw_only=True):
    """How far the job is, and why it is waiting or failed."""

    phase: Annotated[StatusPhase | None, Meta(description="Summary of the conditions.")] = None
    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            description="metav1 conditions. Each message says what to do.",
            extra_json_schema=BY_TYPE,
        ),
    ] = ()
    observed_generation: Annotated[
        int, Meta(description="Generation of the spec that this status describes.")
    ] = 0
    reason: Annotated[str, Meta(description="Reason of the condition that currently matters.")] = ""
    message: Annotated[
        str, Meta(description="Message of the condition that currently matters.")
    ] = ""
    num_nodes: Annotated[
        int | None, Meta(description="Number of nodes of the current attempt.")
    ] = None
    gpus: Annotated[
        int | None, Meta(description="Total number of GPUs of the current attempt.")
    ] = None
    workers: WorkersStatus | None = None
    workers_status: Annotated[
        str, Meta(description='Summary of the counts, for example "3/4 ready".')
    ] = ""
    attempt: Annotated[Gangs, Meta(description="Number of the current attempt, from 0.")] = 0
    restarts: Annotated[
        Gangs,
        Meta(description="Restarts that count towards maxRestarts."),
    ] = 0
    restarts_in_place: Annotated[
        Gangs,
        Meta(description="Restarts of the current attempt in the same pods. Part of restarts."),
    ] = 0
    disruptions: Annotated[
        Gangs,
        Meta(
            description="Restarts after disruptions and ignored failures. They do not count "
            "towards maxRestarts."
        ),
    ] = 0
    running_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000_000_000,
            description="Running time of all previous attempts.",
        ),
    ] = 0
    attempts: Annotated[
        tuple[Attempt, ...],
        Meta(
            max_length=10,
            description="Most recent attempts that have ended, and rounds of attempts that failed"
            " and were restarted in the same pods.",
        ),
    ] = ()
    unfenced: Annotated[
        tuple[UnfencedWorker, ...],
        Meta(description="Pods on lost machines that may still run and write checkpoints."),
    ] = ()
    worker_nodes: Annotated[
        tuple[str, ...],
        Meta(
            max_length=10000,
            description="Machines of the pods of the current attempt that may run their command, "
            "by index. Empty strings stand for other pods and for those in "
            "unfenced.",
        ),
    ] = ()
    avoided_nodes: Annotated[
        tuple[str, ...],
        Meta(
            description="Machines on which two attempts ended because of the machine, or by a "
            "signal. The next gang avoids them if possible."
        ),
    ] = ()
    checkpoint_nodes: Annotated[
        tuple[str, ...],
        Meta(
            max_length=1024,
            description="Machines with the checkpoints of the previous attempt, if checkpoints "
            "stay on machines. The next gang prefers them.",
        ),
    ] = ()
    selector: Annotated[
        str, Meta(description="Label selector of the pods, for the scale subresource.")
    ] = ""
    workspace_revision: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000_000_000,
            description="Revision of the workspace that the current attempt runs, from 1. "
            "kubectl torchrun sync creates a new one.",
        ),
    ] = 0
    workspace_commit: Annotated[
        str,
        Meta(
            description="Version of the source: the commit for git, or a digest of the names, "
            "sizes and ETags of the objects for s3."
        ),
    ] = ""
    start_time: Annotated[Time | None, Meta(description="Time at which all pods first ran.")] = None
    queue_policy: Annotated[
        QueuePolicy | None,
        Meta(
            description="Settings of the queue when the first gang of the job was created. They"
            " stay in effect until the job ends, even if the queue changes or is "
            "deleted. The job's own spec takes precedence."
        ),
    ] = None
    accepted_generation: Annotated[
        int,
        Meta(
            description="Generation of the spec from which the last gang was created. A newer"
            " version of the controller does not check it again."
        ),
    ] = 0
    sync_start_time: Annotated[
        Time | None,
        Meta(description="Time at which the current preparation of the workspace started."),
    ] = None
    completion_time: Annotated[Time | None, Meta(description="Time at which the job finished.")] = (
        None
    )
    last_failure: LastFailure | None = None
    progress: Progress | None = None
    last_checkpoint: Annotated[
        Checkpoint | None,
        Meta(
            description="Newest complete checkpoint. The ranks of the next round or attempt find it"
            " in the file of TORCHRUN_RESUME_FILE, if it exists on every node."
        ),
    ] = None
    earlier_checkpoints: Annotated[
        tuple[Checkpoint, ...],
        Meta(max_length=2, description="Complete checkpoints before the last one, newest first."),
    ] = ()
    estimated_remaining_seconds: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=2_147_483_647,
                description="Time until the last step, by progress. Unset unless the job runs and"
                " its ranks have reported a rate and a total since they started.",
            ),
        ]
        | None
    ) = None
    network: Annotated[
        tuple[NetworkUse, ...],
        Meta(
            max_length=8,
            description="Networks that NCCL uses between the nodes, the most frequent first. Only "
            "nodes whose NCCL has connected to another node count. Empty if a variable NCCL_DEBUG "
            "is set, or NCCL is older than 2.22.",
        ),
    ] = ()
    dependencies_met: Annotated[
        tuple[MetDependency, ...],
        Meta(
            max_length=64,
            description="Dependencies of spec.dependsOn that are met.",
            extra_json_schema=BY_NAME,
        ),
    ] = ()
    admission: Admission | None = None
    queue_position: Annotated[
        int | None,
        Meta(description="Position in the queue while the job waits for admission, from 1."),
    ] = None
