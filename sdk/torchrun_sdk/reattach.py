"""Results for a client that reattaches to a job: from its pods, or from its claim after its end."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from torchrun_sdk import own_jobs
from torchrun_sdk.call_monitor import CallMonitor, Line, Note
from torchrun_sdk.call_state import MISSING, CallState, Limits
from torchrun_sdk.errors import (
    CallError,
    ClusterError,
    Detached,
    JobFailed,
    ProtocolError,
    UntrustedPickle,
)
from torchrun_sdk.kubectl import Kubectl
from torchrun_sdk.manifest import ENDED, GANG, LABEL
from torchrun_sdk.results import open_results
from torchrun_sdk.serialization import FORMATS
from torchrun_sdk.spec import KEPT, Exited, Frame, FrameError, Raised, Result, Started, decode

_FILE = re.compile(rf"==> {KEPT}/([^/]+)/[^/]+ <==")
_FOR_EVER = float("inf")
_LATER = 1e6  # seconds: nothing more will come


def attach(
    job: str,
    kubectl: Kubectl,
    line: Line | None,
    note: Note,
    *,
    timeout: float | None = None,
    trusted: bool = False,
) -> Any:
    """What the last call of a job returned; waits while the call runs.

    trusted: open pickles of any job. Raises CallError as the call itself would,
    ClusterError, UntrustedPickle, Detached at Ctrl-C.
    """
    body = json.loads(kubectl.run("get", "torchrunjob", job, "--output=json"))
    status, labels = body.get("status") or {}, body["metadata"].get("labels") or {}
    if LABEL not in labels:
        raise ClusterError(f"{job} is no call of this package: kt list shows those there are")
    results = _results(job, kubectl, status, line, note, timeout, stays=GANG in labels)
    formats = FORMATS if trusted else own_jobs.accepted(str(body["metadata"].get("uid") or ""))
    all_ranks = labels[LABEL] == "pytorch" and not results[0].head
    try:
        values = open_results(results if all_ranks else results[:1], formats, job)
    except UntrustedPickle as error:
        raise UntrustedPickle(
            f"{error} If you trust the pods of {job} with your account on this machine:"
            f" kt.attach({job!r}, trust=True), or kt results --trust {job}",
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
    if status.get("phase") in ENDED:
        return kept_results(job, kubectl, status)
    limits = Limits(_FOR_EVER, _FOR_EVER, timeout)
    state = CallState(job, limits, time.monotonic(), stays=stays)
    try:
        return CallMonitor(kubectl, state, "", note).run(line)
    except JobFailed as error:
        if error.reason != MISSING:
            raise
        return kept_results(job, kubectl, state.status)
    except KeyboardInterrupt:
        raise Detached(job) from None


def kept_results(
    job: str, kubectl: Kubectl, status: dict[str, Any], call: str = ""
) -> list[Result]:
    """The results that the ranks of a finished job kept on its claim. call: "" for the last one.

    Raises CallError: how the job failed, or that no results were kept.
    """
    try:
        calls = parse_kept(kubectl.run_plugin("kept", job, KEPT))
    except ClusterError as error:
        if status.get("phase") == "Succeeded":
            raise JobFailed(
                f"{job} succeeded, and its results are not kept: {error}", reason=MISSING, job=job
            ) from error
        calls = {}
    except FrameError as error:
        raise ProtocolError(
            f"what the ranks of {job} have kept cannot be read by this version of torchrun-sdk:"
            f" {error}. To see it: kubectl torchrun kept {job} {KEPT}",
            job=job,
        ) from error
    state = CallState(job, Limits(_FOR_EVER, _FOR_EVER), 0.0, kept=True)
    state.job_changed(status, 0.0)
    for frame in calls.get(call or max(calls, default=""), []):
        state.add_frame(state.attempt, frame, 0.0)
    decided = state.decide(_LATER)
    if isinstance(decided, CallError):
        raise decided
    assert isinstance(decided, list)
    return decided


def parse_kept(text: str) -> dict[str, list[Frame]]:
    """The frames in the output of `kubectl torchrun kept`, by call id. Raises FrameError."""
    calls: dict[str, list[Frame]] = {}
    call = ""
    for line in text.split("\n"):
        heading = _FILE.fullmatch(line)
        if heading:
            call = heading[1]
        elif line and call:
            message = decode(line)
            if isinstance(message, (Started, Result, Raised, Exited)):
                calls.setdefault(call, []).append(message)
    for frames in calls.values():
        frames.sort(key=lambda frame: not isinstance(frame, Started))
    return calls
