"""Restarts after failures, deadline and TTL. The values of a queue are defaults of its jobs."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, get_args

from msgspec import Meta

from torchrun_api.kinds.meta import Wire
from torchrun_api.kinds.schema import RemovedField, Rule, one_of
from torchrun_api.kinds.shared import RestartCount

ExitCode = Annotated[int, Meta(ge=1, le=255)]
Signal = Annotated[int, Meta(ge=1, le=64)]
PodCondition = Annotated[str, Meta(min_length=1, max_length=316)]
Seconds = Annotated[int, Meta(ge=1, le=31536000)]
HangSeconds = Annotated[int, Meta(ge=10, le=31536000)]
SecondsOrNone = Annotated[int, Meta(ge=0, le=31536000)]
Action = Literal["fail", "restart", "ignore"]
RestartScope = Literal["InPlace", "Gang"]
# The status keeps the ends of ten attempts.
IdleAttempts = Annotated[int, Meta(ge=0, le=10)]


RestartPolicy = Literal["OnFailure", "Never"]
if TYPE_CHECKING:
    StatusRestartPolicy: TypeAlias = RestartPolicy
else:
    StatusRestartPolicy = Annotated[str, one_of(*get_args(RestartPolicy))]


class FailureRule(Wire, frozen=True, kw_only=True):
    """Matches if any of its entries matches. The first rule that matches decides."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.exitCodes) || has(self.signals) || has(self.podConditions)",
            "set at least one of exitCodes, signals and podConditions",
        ),
    )
    REQUIRED: ClassVar[tuple[str, ...]] = ("action",)

    exit_codes: Annotated[
        tuple[ExitCode, ...],
        Meta(min_length=1, max_length=64, description="Exit codes of the first rank that failed."),
    ] = ()
    signals: Annotated[
        tuple[Signal, ...],
        Meta(
            min_length=1,
            max_length=64,
            description="Signals that ended the first rank that failed.",
        ),
    ] = ()
    pod_conditions: Annotated[
        tuple[PodCondition, ...],
        Meta(
            min_length=1,
            max_length=16,
            description="Pod conditions with status True, for example DisruptionTarget.",
        ),
    ] = ()
    action: Annotated[
        Action,
        Meta(
            description="fail: the job fails. restart: a new gang starts and counts towards "
            "maxRestarts. ignore: a new gang starts and does not count."
        ),
    ] = "restart"


def _in_one_rule(field: str, what: str) -> Rule:
    own_field, others = f"has(r.{field})", f"has(o.{field})"
    return Rule(
        f"!has(self.rules) || self.rules.all(r, !{own_field} || r.{field}.all(v,"
        f" self.rules.exists_one(o, {others} && v in o.{field})))",
        f"{what} must be listed in at most one rule: the first match decides",
    )


_NEVER = "has(self.restartPolicy) && self.restartPolicy == 'Never'"


class QueuePolicy(Wire, frozen=True, kw_only=True):
    """Settings of the queue when the job's first gang was created."""

    max_restarts: (
        Annotated[RestartCount, Meta(description="Value from the queue's reliability.")] | None
    ) = None
    max_attempts_without_progress: (
        Annotated[IdleAttempts, Meta(description="Value from the queue's reliability.")] | None
    ) = None
    restart_policy: (
        Annotated[StatusRestartPolicy, Meta(description="Value from the queue's reliability.")]
        | None
    ) = None
    rules: (
        Annotated[
            tuple[FailureRule, ...],
            Meta(max_length=16, description="Value from the queue's reliability."),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[SecondsOrNone, Meta(description="Value from the queue's reliability.")] | None
    ) = None
    active_deadline_seconds: (
        Annotated[Seconds, Meta(description="Value from the queue's reliability.")] | None
    ) = None
    sync_timeout_seconds: (
        Annotated[Seconds, Meta(description="Value from the queue's reliability.")] | None
    ) = None
    max_run_seconds: (
        Annotated[int, Meta(ge=1, le=100000000, description="Value from the queue's limits.")]
        | None
    ) = None
    max_nodes_per_job: (
        Annotated[int, Meta(ge=1, le=10000, description="Value from the queue's limits.")] | None
    ) = None


class Reliability(Wire, frozen=True, kw_only=True):
    """When jobs restart and when they end. Fields of a job override those of its queue."""

    REMOVED: ClassVar[tuple[RemovedField, ...]] = (
        RemovedField("podReplacement", "string", "Remove it: a lost pod leads to a new gang."),
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!({_NEVER}) || !has(self.maxRestarts) || self.maxRestarts == 0",
            "maxRestarts must be 0 or unset with restartPolicy Never",
        ),
        Rule(
            f"!({_NEVER}) || !has(self.rules) || self.rules.all(r, r.action == 'fail')",
            "the action of all rules must be fail with restartPolicy Never",
        ),
        _in_one_rule("exitCodes", "an exit code"),
        _in_one_rule("signals", "a signal"),
        _in_one_rule("podConditions", "a pod condition"),
    )

    max_restarts: (
        Annotated[
            RestartCount,
            Meta(
                description="Maximum number of restarts after failures, in the same pods or in new "
                "ones. Disruptions (preemption, drain, a machine that is lost or low on "
                "memory or disk) do not count. Default: 3."
            ),
        ]
        | None
    ) = None
    max_attempts_without_progress: (
        Annotated[
            IdleAttempts,
            Meta(
                description="Number of failures in a row, in the same pods or in new ones, without "
                "a newer step or a newer checkpoint, after which the job fails (reason "
                "NoProgress). Failures that do not count towards maxRestarts are left out. No "
                "effect on a job that never reported a step or a checkpoint. 0: no limit. "
                "Default: 3."
            ),
        ]
        | None
    ) = None
    restart_policy: (
        Annotated[
            RestartPolicy,
            Meta(
                description="Never: the job fails at its first failure or disruption. After a "
                "pause, a resize or a preemption by admission, a new gang follows as usual. "
                "Default: OnFailure."
            ),
        ]
        | None
    ) = None
    restart_scope: (
        Annotated[
            RestartScope,
            Meta(
                description="What restarts after a rank has failed. InPlace: the ranks of all "
                "nodes, in the same pods. The third failure of one kind without a newer step in "
                "between, one that comes sooner and in another way than the one before, a failure "
                "that a rule matches, and the failure of a pod or a machine still lead to a new "
                "gang. Gang: all pods, as a new gang. Default: InPlace."
            ),
        ]
        | None
    ) = None
    rules: (
        Annotated[
            tuple[FailureRule, ...],
            Meta(
                max_length=16,
                description="Actions by exit code, signal or pod condition. The first match "
                "decides.",
            ),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[
            SecondsOrNone,
            Meta(
                description="Time after which a finished TorchrunJob is deleted, once the jobs that"
                " depend on it have recorded how it ended. Default: never."
            ),
        ]
        | None
    ) = None
    active_deadline_seconds: (
        Annotated[
            Seconds,
            Meta(
                description="Maximum running time. The job then ends as TimedOut. Time spent "
                "waiting or suspended does not count. Default: no limit."
            ),
        ]
        | None
    ) = None
    sync_timeout_seconds: (
        Annotated[
            Seconds,
            Meta(
                description="Maximum time in phase Syncing for each preparation of the workspace. "
                "The job then fails. Default: no limit."
            ),
        ]
        | None
    ) = None
    hang_timeout_seconds: (
        Annotated[
            HangSeconds,
            Meta(
                description="Maximum time in which no rank of a node calls "
                "torchrun_progress.report and the node has no output. The gang then "
                "fails (reason Hung, exit code 124), and the log shows the stacks of "
                "all ranks. The time counts from the first report. If the script "
                "never imports torchrun_progress, it counts from the first output of "
                "rank 0 and only for the node of rank 0. Choose a value above the "
                "longest silence of any node, for example during a checkpoint or an "
                "evaluation. Default: no limit."
            ),
        ]
        | None
    ) = None
    allow_unfenced_restart: (
        Annotated[
            bool,
            Meta(
                description="Starts a new gang even if pods on a lost machine may still run and "
                "write the same checkpoints. Default: false; the new gang waits until "
                "these pods are fenced."
            ),
        ]
        | None
    ) = None
    termination_grace_period_seconds: (
        Annotated[
            SecondsOrNone,
            Meta(
                description="Grace period of the pods. Ranks have 5 s less between SIGTERM and "
                "SIGKILL, for a last checkpoint. If podTemplate sets it too, the longer time "
                "applies. Default: 30."
            ),
        ]
        | None
    ) = None
