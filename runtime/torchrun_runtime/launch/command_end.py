"""Why the command of a node ended: its own failure, a signal, a watchdog, or the end of a round."""

from __future__ import annotations

import signal
import time

from .cause import PEER_FAILED, PEER_STOPPED, WAS_STOPPED, Cause, is_peer_loss
from .contract import STOPPED
from .failure import (
    Report,
    cause_of_background,
    find_cause,
    find_masked_failure,
    out_of_memory_of,
    read_reports,
)
from .gang.messages import StopRound
from .output import timestamp
from .processes import Process, Running, signal_name
from .stopping import Stopped
from .supervise import CommandExit, StopRequest

# How long a rank may have been dead when its launcher stops the others: torchrun gives them 30 s.
UNNOTICED_SECONDS = 40.0


def cause_of_end(
    command_exit: CommandExit,
    command: str | list[str],
    background: Process | None,
    reports: str,
    out_of_memory: bool,
) -> Cause | None:
    """The cause of the end of a command; None if it succeeded.

    background: a Python that still ran when the command ended with 0.
    """
    if command_exit.stop_request is not None:
        return cause_of_request(command_exit.stop_request, out_of_memory)
    if command_exit.stopped_by is not None:
        return _cause_of_signal(command_exit.stopped_by)
    if command_exit.exit_code == 0 and background is not None:
        return cause_of_background(background)
    if command_exit.exit_code == 0:
        return find_masked_failure(command, read_reports(reports), reports, time.time())
    return find_cause(command_exit, read_reports(reports), time.time(), out_of_memory)


def describe_stop(stop: StopRound) -> str:
    """Why the leader has ended a round."""
    return "a rank on another node has failed" if stop.failed else "there is newer code"


def cause_of_round(
    stop: StopRound, stopped_at: float, running: Running, reports: str, out_of_memory: bool
) -> Cause:
    """The cause of an end by order of the leader; that of a rank that had failed shortly before.

    running: at the time of the order. out_of_memory: the kernel killed a process of this container
    within UNNOTICED_SECONDS.
    """
    if stop.failed and out_of_memory:
        return out_of_memory_of(None, stopped_at)
    exceptions = [
        report
        for report in read_reports(reports)
        if not report.failures and _had_failed(report, stopped_at, running)
    ]
    if stop.failed and exceptions:
        first = min(exceptions, key=lambda report: (report.nested, report.time))
        cause = Cause(1, first.rank, None, "Exception", first.message, timestamp(first.time))
        if not is_peer_loss(cause):
            return cause
    if stop.failed:
        message = f"The ranks of this node were stopped, because {describe_stop(stop)}."
        return Cause(STOPPED, None, None, PEER_FAILED, message, timestamp())
    message = "The ranks of this node were stopped for newer code, and the gang has ended."
    return Cause(STOPPED, None, signal.SIGTERM, WAS_STOPPED, message, timestamp())


def _had_failed(report: Report, stopped_at: float, running: Running) -> bool:
    """Whether the exception had ended a rank, or was just about to: its process had not ended yet.

    A rank that runs on has survived the failure of another process.
    """
    is_recent = 0 < stopped_at - report.time < UNNOTICED_SECONDS
    return is_recent and (report.rank not in running.ranks or report.pid in running.pids)


def cause_after_leftovers(cause: Cause | None, earlier: tuple[int, Cause], node: int) -> Cause:
    """The cause of this node if what an earlier round left has made the last round fail.

    earlier: the node with the cause of that round, and the cause.
    """
    if earlier[0] == node:
        return earlier[1]
    message = (
        "The ranks were started again after a failure on another node, and have found what the"
        f" killed round had left: {'' if cause is None else cause.message}"
    )
    return Cause(STOPPED, None, None, PEER_FAILED, message, timestamp())


def cause_of_missed_round() -> Cause:
    """The cause of a node whose ranks did not start in the last round: another node has one."""
    message = "The gang ended before the ranks of this node started."
    return Cause(STOPPED, None, None, PEER_FAILED, message, timestamp())


def cause_of_survivors() -> Cause:
    """The cause of a node that has succeeded, but cannot take part in another round."""
    message = (
        "The ranks of this node did not start again, because processes of the round before cannot"
        " be killed."
    )
    return Cause(STOPPED, None, signal.SIGTERM, WAS_STOPPED, message, timestamp())


def cause_of_request(stop_request: StopRequest, out_of_memory: bool) -> Cause:
    """The cause of a request of a watchdog."""
    code, reason, message = stop_request
    if out_of_memory:
        message += "; before that, the kernel killed a process at the memory limit"
    return Cause(code, None, None, reason, message, timestamp())


def cause_of_agreement(stopped: Stopped, reports: list[Report]) -> Cause:
    """The cause of ranks that all stopped at one call: they have not finished the training."""
    of_ranks = [report for report in reports if report.rank is not None and not report.nested]
    failed = min(of_ranks, key=lambda report: report.time, default=None)
    if not stopped.was_told:
        message = f"The ranks were killed before call {stopped.call}, at which all were to stop."
    elif failed is not None:
        message = (
            f"The ranks stopped at call {stopped.call}, and rank {failed.rank} failed:"
            f" {failed.message}"
        )
    else:
        message = f"All ranks stopped at call {stopped.call}, as they had agreed."
    if not stopped.was_asked:
        message += " Another node was asked to end."
    reason = WAS_STOPPED if stopped.was_asked else PEER_STOPPED
    return Cause(STOPPED, None, signal.SIGTERM, reason, message, timestamp())


def _cause_of_signal(number: int) -> Cause:
    # The exit code ignores those of the ranks: a rank that saves a checkpoint and exits 0 has not
    # finished the training.
    message = f"Stopped by {signal_name(number)}, which was forwarded to the command."
    return Cause(STOPPED, None, number, WAS_STOPPED, message, timestamp())
