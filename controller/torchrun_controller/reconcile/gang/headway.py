"""How far the ranks of a gang got, and whether the attempts of a job still get further.

The launchers of a gang stop to restart its ranks after three alike failures without a newer step:
the pods or their machines may be the cause, and a new gang follows. A job whose gangs and rounds
get no further ends here, because the cause is then in the job.

A reported step or checkpoint is a claim of the job, and decides only over the job.
"""

from collections.abc import Iterable
from datetime import datetime

from torchrun_api.kinds.status import Attempt, Progress, TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import Reason, find_condition
from torchrun_controller.reconcile.model.messages import count_of, sentence
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.model.times import order_of, running_since
from torchrun_controller.reconcile.pods.lifecycle import attempt_of

NO_PROGRESS = "NoProgress"
RESUMED = "Resumed"  # the condition of ranks that came back behind a checkpoint


def ranks_start(
    status: TorchrunJobStatus, gang: ObservedGang, ends: Iterable[Attempt]
) -> datetime | None:
    """Return when the ranks of the latest gang started, at the earliest; None without a gang.

    That is its creation, or the end of its last round in `ends`, or the time since which the status
    has it running: a suspended Job resumes with new pods.
    """
    if not gang.child_jobs:
        return None
    number = attempt_of(gang.current_job)
    times = (
        gang.current_job.metadata.creation_timestamp,
        running_since(status),
        *(end.end_time for end in ends if end.number == number),
    )
    return max((time for time in times if time is not None), default=None)


def newest_step(
    status: TorchrunJobStatus, report: Progress | None, since: datetime | None
) -> int | None:
    """Return the newest step that ranks reported since then; None for none."""
    reports = (each for each in (status.progress, report) if each is not None)
    steps = (
        each.step
        for each in reports
        if since is None or (each.time is not None and each.time >= since)
    )
    return max((step for step in steps if step is not None), default=None)


def newest_saved(gang: ObservedGang) -> int | None:
    """Return the step of the last complete checkpoint; None for none."""
    return gang.checkpoints[0].step if gang.checkpoints else None


def find_stagnation(
    status: TorchrunJobStatus, new_ends: Iterable[Attempt], limit: int
) -> Reason | None:
    """Return why the job should end: its last `limit` counted attempts or rounds got no further.

    None with a limit of 0, and for a job that never reported anything. Ends that do not count are
    left out: nothing is wrong with a job whose machines are lost.
    """
    by_order = {order_of(end): end for end in (*new_ends, *status.attempts)}
    reached = saved = -1
    idle: list[Attempt] = []
    for order in sorted(by_order):
        end = by_order[order]
        step = -1 if end.step is None else end.step
        checkpoint = -1 if end.checkpoint_step is None else end.checkpoint_step
        if step > reached or checkpoint > saved:
            idle = []
        elif end.counted:
            idle.append(end)
        reached, saved = max(reached, step), max(saved, checkpoint)
    has_reported = status.progress is not None or max(reached, saved) >= 0
    if not limit or len(idle) < limit or not has_reported:
        return None
    return Reason(NO_PROGRESS, _describe(idle, reached, saved))


def check_resumption(
    status: TorchrunJobStatus,
    gang: ObservedGang,
    progress: Progress | None,
    since: datetime | None,
) -> Reason | None:
    """Return that ranks which started then are behind a checkpoint of earlier ranks, else None.

    The first such message stays while they are: it has the step at which they came back.
    """
    if progress is None or progress.step is None or progress.time is None or since is None:
        return None
    checkpoint = next((each for each in gang.checkpoints if each.time < since), None)
    if checkpoint is None or progress.time < since or progress.step >= checkpoint.step:
        return None
    told = find_condition(status.conditions, RESUMED)
    if told is not None and told.last_transition_time and told.last_transition_time >= since:
        return Reason(told.reason, told.message)
    return Reason(
        "ResumedBehind",
        f"The ranks resumed at or before step {progress.step}, although the checkpoint of step"
        f" {checkpoint.step} is complete: the script has not loaded it. Load the checkpoint that"
        " the file of TORCHRUN_RESUME_FILE names.",
    )


def _describe(idle: list[Attempt], reached: int, saved: int) -> str:
    limits = [f"no newer step than {reached}" if reached >= 0 else "no step"]
    if saved >= 0:
        limits.append(f"no newer checkpoint than that of step {saved}")
    attempts = [_name(end) + f" ({_step(end)})" for end in idle]
    return (
        f"The last {count_of(len(idle), 'failure')} came with {' and '.join(limits)}:"
        f" {', '.join(attempts)}. Correct the cause and submit the job again. To allow more of"
        " them, set reliability.maxAttemptsWithoutProgress; 0 is no limit. The last failure:"
        f" {sentence(idle[-1].message)}"
    )


def _name(end: Attempt) -> str:
    part = "" if end.round is None else f", round {end.round}"
    return f"attempt {end.number}{part}"


def _step(end: Attempt) -> str:
    return "no step" if end.step is None else f"step {end.step}"
