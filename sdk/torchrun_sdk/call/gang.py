"""The client of a TorchrunJob that runs calls, one after the other."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from torchrun_sdk.call.connections import CallDelivery
from torchrun_sdk.call.monitor import CallMonitor, Line, Note, PodsUnavailableError
from torchrun_sdk.call.reattach import results_after
from torchrun_sdk.call.state import CallLimits, CallState
from torchrun_sdk.cluster import kuberay, own_jobs
from torchrun_sdk.cluster.cancel import Cancellation, Cancelled
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.cluster.manifest import TERMINAL_PHASES, build
from torchrun_sdk.compute import Compute
from torchrun_sdk.errors import (
    CallError,
    CallTimeout,
    ClusterError,
    Detached,
    LaunchTimeout,
    QuorumTimeout,
)
from torchrun_sdk.spec import ENTRY, FOLDER, SCRIPT_NAME, Call, Result, write_call

_ENTRY = """import sys
from pathlib import Path
from types import ModuleType

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here))
if sys.argv[1:2] == ["collect"]:  # skip most imports, because a client waits for it
    package = sys.modules["torchrun_sdk"] = ModuleType("torchrun_sdk")
    package.__path__ = [str(here / "torchrun_sdk")]
from torchrun_sdk.worker.__main__ import main

if __name__ == "__main__":  # not in processes of multiprocessing, which import this file
    sys.exit(main(sys.argv[1:], here))
"""
# A process of multiprocessing imports the script as its __main__. Pickled functions name the module
# of the script in the parent.
_SCRIPT = 'import sys\n\nsys.modules[__name__] = sys.modules["__main__"]\n'
# After these errors the job is deleted, because no client waits for it.
_ABANDONED = (LaunchTimeout, QuorumTimeout, CallTimeout)
# If set, the times of a call's events are printed on stderr.
_TIMES = "TORCHRUN_SDK_TIMES"
# A client that detached may reattach the next day.
_TTL_SECONDS = 24 * 3600


class Gang:
    """One job. `run` creates it with the first call, and delivers later calls to its pods.

    root: the directory to upload. created: the job exists with warm pods; uid: its UID. key: the
    label by which other programs find the job. is_own: this user created the job on this machine.
    """

    def __init__(
        self,
        name: str,
        compute: Compute,
        root: Path,
        note: Note,
        *,
        key: str = "",
        created: bool = False,
        uid: str = "",
    ) -> None:
        self.name = name
        self.root = root
        self.busy = threading.Lock()
        self._compute = compute
        self._note = note
        self._key = key
        self._kubectl = Kubectl(compute.namespace)
        self._created = created
        self._uid = uid
        self.is_own = not created or own_jobs.is_own(uid)
        self._has_ended = False

    @property
    def is_warm(self) -> bool:
        """Whether its pods accept another call."""
        return self._created and not self._has_ended

    def run(
        self,
        call: Call,
        timeout: float | None,
        line: Line | None,
        cancellation: Cancellation | None = None,
    ) -> list[Result]:
        """Run one call: the results of all ranks, sorted. The caller holds `busy`.

        line: called with each line of the logs. Raises CallError, ClusterError, UsageError;
        UnavailableError if warm pods cannot run it; Detached at Ctrl-C, or KeyboardInterrupt if
        the call has not started; Cancelled, after ending the call, and the job if it was created
        for it.
        """
        stays = bool(call.idle)
        first = not self._created
        delivery = CallDelivery(call, self.root, self._kubectl) if stays else None
        monitor: CallMonitor | None = None
        state: CallState | None = None
        try:
            if first:
                self.start(call, cancellation)
            elif delivery is not None:
                delivery.start_listing()
            if self.is_own:
                own_jobs.record(self._uid, call.arguments.format)
            state = self._call_state(timeout, stays=stays)
            monitor = CallMonitor(
                self._kubectl,
                state,
                call.id,
                self._note,
                nodes=self._compute.distribution.nodes,
                delivery=delivery,
                first=first,
                cancellation=cancellation,
            )
            return self._follow(monitor, state, line, stays=stays)
        except KeyboardInterrupt:
            if not self._created:
                raise
            if not first and not (monitor and monitor.is_delivered):
                # The newest call of the pods, which `attach` would return, is the previous one.
                self._note(f"{self.name}: the call was not started; its pods stay.")
                raise
            self._detach()
            raise Detached(self.name) from None
        except PodsUnavailableError:
            self._has_ended = True
            raise
        except Cancelled:
            if first or not stays:
                self._abandon()
            raise
        except CallError as error:
            if state is None:
                raise
            return self._kept_results_after(error, call, state)

    def _follow(
        self, monitor: CallMonitor, state: CallState, line: Line | None, *, stays: bool
    ) -> list[Result]:
        """Follow the call to its end, and note whether the pods may take another one."""
        try:
            return monitor.run(line)
        finally:
            self._has_ended = self._has_ended or not stays or state.phase in TERMINAL_PHASES
            if os.environ.get(_TIMES):
                self._note(f"{self.name}: {monitor.times}")

    def _kept_results_after(self, error: CallError, call: Call, state: CallState) -> list[Result]:
        """The results on the PVC if the job ended without sending them; else raises the error.

        Deletes the job if no client waits for it any more.
        """
        if isinstance(error, _ABANDONED):
            error = self._with_operator_reason(error)
            self._abandon()
        return results_after(error, state, self._kubectl, call.id)

    def _with_operator_reason(self, error: CallError) -> CallError:
        """The error with the reason why the operator's pods do not run."""
        if not self._compute.distribution.operator or isinstance(error, CallTimeout):
            return error
        why = kuberay.pending_reason(self.name, self._kubectl)
        return type(error)(f"{error}; {why}", job=self.name, rank=error.rank, node=error.node)

    def _call_state(self, timeout: float | None, *, stays: bool) -> CallState:
        quorum = self._compute.distribution.quorum_timeout
        limits = CallLimits(self._compute.launch_timeout, quorum, timeout)
        return CallState(self.name, limits, time.monotonic(), stays=stays)

    def _detach(self) -> None:
        self._has_ended = True
        self._note(
            f"Detached. Job {self.name} continues.\n"
            f"  kt logs {self.name}\n"
            f"  kt results {self.name}      (kt.attach({self.name!r}) in Python)\n"
            f"  kt down {self.name}"
        )
        patch = {"spec": {"reliability": {"ttlSecondsAfterFinished": _TTL_SECONDS}}}
        words = ["patch", "torchrunjob", self.name, "--type=merge", "--patch", json.dumps(patch)]
        try:
            self._kubectl.run(*words)
        except ClusterError as error:
            self._note(f"Results are kept only for an hour after the job ends: {error}")

    def start(self, call: Call, cancellation: Cancellation | None = None) -> None:
        """Create the job for a call. Raises ClusterError, UsageError, LaunchTimeout, Cancelled."""
        if self._compute.distribution.operator:
            kuberay.check(self._compute, self._kubectl)
            call = call._replace(
                cluster=kuberay.service(self.name), quorum=self._compute.launch_timeout
            )
        with tempfile.TemporaryDirectory() as overlay:
            write_overlay(Path(overlay) / FOLDER, call)
            self._send(Path(overlay), call, cancellation)

    def down(self) -> None:
        """Delete the job and its pods."""
        self._has_ended = True
        self._kubectl.delete_job(self.name)

    def _send(self, overlay: Path, call: Call, cancellation: Cancellation | None) -> None:
        for volume in self._compute.volumes:
            self._kubectl.create_missing(volume.claim())
        body = build(self.name, self._compute, self._key)
        words = ["submit", "--filename", "-", "--no-follow"]
        words += ["--directory", str(self.root), "--overlay", str(overlay)]
        limit = max(self._compute.launch_timeout, 1)
        words += ["--upload-timeout", f"{math.ceil(limit)}s"]
        start = time.monotonic()
        try:
            self._kubectl.run_plugin(*words, stdin=json.dumps(body), cancellation=cancellation)
            get = ("get", "torchrunjob", self.name, "--output=jsonpath={.metadata.uid}")
            self._uid = self._kubectl.run(*get).strip()
            if self._compute.distribution.operator:
                rayjob = kuberay.build(self.name, self._uid, self._compute, call.secret)
                self._kubectl.run("create", "-f", "-", stdin=json.dumps(rayjob))
        except ClusterError as error:
            if not self._abandon():
                raise
            # The plugin says how to continue with a job that has no workspace yet.
            text = f"{error}\nJob {self.name} is deleted. Repeat the call."
            if time.monotonic() - start >= limit:
                raise LaunchTimeout(text, job=self.name) from error
            raise ClusterError(text) from error
        except (Cancelled, KeyboardInterrupt):
            self._abandon()
            raise
        self._created = True
        own_jobs.record(self._uid, call.arguments.format)
        self._note(f"{self.name}: requested {self._compute.distribution.workers} worker(s)")

    def _abandon(self) -> bool:
        """Delete the job after an error. Return whether a job was deleted."""
        self._has_ended = True
        return self._kubectl.abandon_job(self.name, self._note)


def write_overlay(folder: Path, call: Call) -> None:
    """Write the files that the pods need in addition to the project: this package and the call."""
    package = Path(__file__).parents[1]
    shutil.copytree(
        package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    (folder / ENTRY).write_text(_ENTRY, encoding="utf-8")
    (folder / f"{SCRIPT_NAME}.py").write_text(_SCRIPT, encoding="utf-8")
    write_call(folder, call)
