"""Results for a client that reattaches to a job: from its pods, or from its PVC after its end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from torchrun_sdk.call.monitor import CallMonitor, Line, Note
from torchrun_sdk.call.results import open_results
from torchrun_sdk.call.state import MISSING, CallLimits, CallState
from torchrun_sdk.cluster import own_jobs
from torchrun_sdk.cluster.kubectl import Kubectl, output_lines
from torchrun_sdk.cluster.manifest import APP, GANG, LABEL, TERMINAL_PHASES
from torchrun_sdk.errors import (
    CallError,
    ClusterError,
    Detached,
    JobFailed,
    ProtocolError,
    UntrustedPickle,
    UsageError,
)
from torchrun_sdk.serialization import FORMATS
from torchrun_sdk.spec import (
    STATE_FOLDER,
    Exited,
    Frame,
    FrameError,
    Raised,
    Result,
    Started,
    decode,
)

_NAME = re.compile(rf"{STATE_FOLDER}/(\w+)/\d+\.(started|left)")
_HEADING = re.compile(r"==> (.+) <==")
_NO_LIMIT = float("inf")
_LATER = 1e6  # seconds, later than all events


def attach(
    job: str,
    kubectl: Kubectl,
    line: Line | None,
    note: Note,
    *,
    timeout: float | None = None,
    trusted: bool = False,
) -> Any:
    """The results of the last call of a job; waits while the call runs.

    trusted: open pickles of any job. Raises CallError as the call itself does,
    ClusterError, UsageError for an app, UntrustedPickle, Detached at Ctrl-C.
    """
    body = json.loads(kubectl.run("get", "torchrunjob", job, "--output=json"))
    status, labels = body.get("status") or {}, body["metadata"].get("labels") or {}
    if LABEL not in labels:
        raise ClusterError(f"Job {job} was not created by this package. List its jobs: kt list")
    if labels[LABEL] == APP:
        raise UsageError(f"Job {job} is an app, which returns no results. Follow it: kt logs {job}")
    results = _results(job, kubectl, status, line, note, timeout, stays=GANG in labels)
    formats = FORMATS if trusted else own_jobs.accepted(str(body["metadata"].get("uid") or ""))
    all_ranks = labels[LABEL] == "pytorch" and not results[0].head
    try:
        values = open_results(results if all_ranks else results[:1], formats, job)
    except UntrustedPickle as error:
        raise UntrustedPickle(
            f"{error} If you trust the pods of {job} to run code on this machine, use"
            f" kt.attach({job!r}, trust=True) or kt results --trust {job}",
            job=job,
        ) from error
    return values if all_ranks else values[0]


def _results(
    job: str,
    kubectl: Kubectl,
    status: dict[str, Any],
    line: Line | None,
    note: Note,
    timeout: float | None,
    *,
    stays: bool,
) -> list[Result]:
    if status.get("phase") in TERMINAL_PHASES:
        return kept_results(job, kubectl, status)
    limits = CallLimits(_NO_LIMIT, _NO_LIMIT, timeout)
    state = CallState(job, limits, time.monotonic(), stays=stays)
    try:
        return CallMonitor(kubectl, state, "", note).run(line)
    except CallError as error:
        return results_after(error, state, kubectl)
    except KeyboardInterrupt:
        raise Detached(job) from None


def results_after(
    error: CallError, state: CallState, kubectl: Kubectl, call: str = ""
) -> list[Result]:
    """The results on the PVC after an error of a call; call: "" for the last one.

    Raises the exception that a rank stored, or else the error: the client may have been
    disconnected when the ranks ended.
    """
    if not state.may_have_kept_frames or isinstance(error, ProtocolError):
        raise error
    try:
        return kept_results(state.name, kubectl, state.status, call)
    except ProtocolError:
        if state.phase == "Succeeded":
            raise
        raise error from None


def kept_results(
    job: str, kubectl: Kubectl, status: dict[str, Any], call: str = ""
) -> list[Result]:
    """The results that the ranks of a finished job wrote to its PVC. call: "" for the last one.

    Raises CallError: how the job failed, or that no results were kept.
    """
    try:
        frames = _stored_frames(job, kubectl, call)
    except ClusterError as error:
        if status.get("phase") == "Succeeded":
            raise JobFailed(
                f"Job {job} succeeded, but its results are not available: {error}",
                reason=MISSING,
                job=job,
            ) from error
        frames = []
    except FrameError as error:
        raise ProtocolError(
            f"This version of torchrun-sdk cannot decode the results of job {job}: {error}."
            f" To print them: kubectl torchrun state-files {job} {STATE_FOLDER}",
            job=job,
        ) from error
    return outcome(job, status, frames)


def outcome(job: str, status: dict[str, Any], frames: Iterable[Frame]) -> list[Result]:
    """The results of a finished job from its frames, sorted by rank. Raises CallError."""
    state = CallState(job, CallLimits(_NO_LIMIT, _NO_LIMIT), 0.0, from_storage=True)
    state.job_changed(status, 0.0)
    for frame in frames:
        state.add_frame(state.attempt, frame, 0.0)
    decided = state.decide(_LATER)
    if isinstance(decided, CallError):
        raise decided
    assert isinstance(decided, list)
    return decided


def _stored_frames(job: str, kubectl: Kubectl, call: str) -> list[Frame]:
    """The frames of a call that its ranks stored. call: "" for the last one.

    Raises ClusterError, FrameError.
    """
    call = call or _last_call(kubectl.run_plugin("state-files", job, STATE_FOLDER, "--output=name"))
    if not call:
        return []
    command = kubectl.plugin("state-files", job, f"{STATE_FOLDER}/{call}")
    with closing(output_lines(command)) as lines:
        return parse_state_files(lines)


def _last_call(names: str) -> str:
    """The last call of which these files are; "" without one."""
    files = (_NAME.fullmatch(line) for line in names.split("\n"))
    return max((file[1] for file in files if file), default="")


def parse_state_files(lines: Iterable[str]) -> list[Frame]:
    """The frames in the output of `kubectl torchrun state-files`. Raises FrameError.

    Other files than the frames of ranks are skipped: a program may end while it writes one.
    """
    frames: list[Frame] = []
    is_frame = False
    for line in lines:
        text = line.rstrip("\n")
        heading = _HEADING.fullmatch(text)
        if heading:
            is_frame = _NAME.fullmatch(heading[1]) is not None
        elif text and is_frame:
            message = decode(text)
            if isinstance(message, (Started, Result, Raised, Exited)):
                frames.append(message)
    frames.sort(key=lambda frame: not isinstance(frame, Started))
    return frames
