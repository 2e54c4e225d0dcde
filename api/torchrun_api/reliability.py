"""What a job does when something fails, and when it ends; a queue's are its jobs' defaults."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from torchrun_api.meta import Wire
from torchrun_api.schema import Rule
from torchrun_api.shared import RestartCount

ExitCode = Annotated[int, Meta(ge=1, le=255)]
Signal = Annotated[int, Meta(ge=1, le=64)]
PodCondition = Annotated[str, Meta(min_length=1, max_length=316)]
Seconds = Annotated[int, Meta(ge=1, le=31536000)]
HangSeconds = Annotated[int, Meta(ge=10, le=31536000)]
SecondsOrNone = Annotated[int, Meta(ge=0, le=31536000)]
Action = Literal["fail", "restart", "ignore"]


class FailureRule(Wire, frozen=True, kw_only=True):
    """Matches where any of its entries does; the first rule that matches decides."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.exitCodes) || has(self.signals) || has(self.podConditions)",
            "a rule without exitCodes, signals and podConditions can never match",
        ),
    )
    REQUIRED: ClassVar[tuple[str, ...]] = ("action",)

    exit_codes: Annotated[
        tuple[ExitCode, ...],
        Meta(min_length=1, max_length=64, description="Exit codes of the first failed rank."),
    ] = ()
    signals: Annotated[
        tuple[Signal, ...],
        Meta(min_length=1, max_length=64, description="Signals that ended the first failed rank."),
    ] = ()
    pod_conditions: Annotated[
        tuple[PodCondition, ...],
        Meta(
            min_length=1,
            max_length=16,
            description="Conditions of its pod that are True, as DisruptionTarget.",
        ),
    ] = ()
    action: Annotated[
        Action,
        Meta(
            description="fail: the job fails. restart: a new gang, counted by maxRestarts. "
            "ignore: a new gang that is not counted."
        ),
    ] = "restart"


def _in_one_rule(field: str, what: str) -> Rule:
    mine, others = f"has(r.{field})", f"has(o.{field})"
    return Rule(
        f"!has(self.rules) || self.rules.all(r, !{mine} || r.{field}.all(v,"
        f" self.rules.exists_one(o, {others} && v in o.{field})))",
        f"{what} may stand in one of the rules only: the first that names it decides",
    )


_NEVER = "has(self.restartPolicy) && self.restartPolicy == 'Never'"


class QueuePolicy(Wire, frozen=True, kw_only=True):
    """What a queue said of ends and repetition when the job's first gang was created."""

    max_restarts: (
        Annotated[RestartCount, Meta(description="Of the queue's reliability.")] | None
    ) = None
    restart_policy: (
        Annotated[Literal["OnFailure", "Never"], Meta(description="Of the queue's reliability.")]
        | None
    ) = None
    rules: (
        Annotated[
            tuple[FailureRule, ...],
            Meta(max_length=16, description="Of the queue's reliability."),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[SecondsOrNone, Meta(description="Of the queue's reliability.")] | None
    ) = None
    active_deadline_seconds: (
        Annotated[Seconds, Meta(description="Of the queue's reliability.")] | None
    ) = None
    sync_timeout_seconds: (
        Annotated[Seconds, Meta(description="Of the queue's reliability.")] | None
    ) = None
    max_run_seconds: (
        Annotated[int, Meta(ge=1, le=100000000, description="Of the queue's limits.")] | None
    ) = None
    max_nodes_per_job: (
        Annotated[int, Meta(ge=1, le=10000, description="Of the queue's limits.")] | None
    ) = None


class Reliability(Wire, frozen=True, kw_only=True):
    """When a gang is started again, and when the job ends. Unset fields are the queue's."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!({_NEVER}) || !has(self.maxRestarts) || self.maxRestarts == 0",
            "restartPolicy Never contradicts a maxRestarts above 0: leave one of them out",
        ),
        Rule(
            f"!({_NEVER}) || !has(self.rules) || self.rules.all(r, r.action == 'fail')",
            "restartPolicy Never contradicts rules whose action is restart or ignore:"
            " leave one of them out",
        ),
        _in_one_rule("exitCodes", "an exit code"),
        _in_one_rule("signals", "a signal"),
        _in_one_rule("podConditions", "a pod condition"),
    )

    max_restarts: (
        Annotated[
            RestartCount,
            Meta(
                description="New gangs after failures of the job's own. Disruptions (preemption, "
                "drain, eviction, lost nodes) are not counted. Default: 3."
            ),
        ]
        | None
    ) = None
    restart_policy: (
        Annotated[
            Literal["OnFailure", "Never"],
            Meta(description="Never: no new gang, whatever ended the last. Default: OnFailure."),
        ]
        | None
    ) = None
    rules: (
        Annotated[
            tuple[FailureRule, ...],
            Meta(
                max_length=16,
                description="Decide by exit code, signal or pod condition; first match wins.",
            ),
        ]
        | None
    ) = None
    ttl_seconds_after_finished: (
        Annotated[
            SecondsOrNone,
            Meta(description="The TorchrunJob is deleted so long after its end. Default: never."),
        ]
        | None
    ) = None
    active_deadline_seconds: (
        Annotated[
            Seconds,
            Meta(
                description="Running time after which the job ends as TimedOut; waiting and "
                "pauses are not counted. Default: none."
            ),
        ]
        | None
    ) = None
    sync_timeout_seconds: (
        Annotated[
            Seconds,
            Meta(
                description="Time in phase Syncing after which the job fails: of each preparation "
                "of the workspace, before the first gang or a later one. Default: none."
            ),
        ]
        | None
    ) = None
    hang_timeout_seconds: (
        Annotated[
            HangSeconds,
            Meta(
                description="A gang whose ranks give no sign of life for so long has failed "
                "(reason Hung, exit code 124), with the stacks of all ranks in the log. Signs of "
                "life are calls of torchrun_progress.report and output. It counts from the first "
                "report; where torchrun_progress is never imported, from rank 0's first output, "
                "and then for rank 0's node alone. Choose more than the longest pause between two "
                "signs of any node, as for a checkpoint or an evaluation. Default: no watch."
            ),
        ]
        | None
    ) = None
    allow_unfenced_restart: (
        Annotated[
            bool,
            Meta(
                description="Start a new gang beside workers on a lost node that may still run and "
                "write the same checkpoints. Default: false, it waits until they are fenced."
            ),
        ]
        | None
    ) = None
    termination_grace_period_seconds: (
        Annotated[
            SecondsOrNone,
            Meta(
                description="From SIGTERM to SIGKILL, for a last checkpoint. Where podTemplate "
                "sets it too, the longer one counts. Default: 30."
            ),
        ]
        | None
    ) = None
