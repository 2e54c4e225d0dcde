"""One job and its objects, as an API server and the Job controller would keep them."""

import itertools
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.json import JsonObject, object_at
from torchrun_api.kinds.core import (
    ContainerState,
    ContainerStatus,
    Job,
    Pod,
    PodPhase,
    Service,
    StateRunning,
    StateTerminated,
)
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS, PODS, SERVICES, TORCHRUN_JOBS
from torchrun_api.kinds.status import Checkpoint, Progress, TorchrunJobStatus
from torchrun_controller.reconcile import Observed
from torchrun_controller.reconcile.model.observed import (
    Installed,
    ObservedCluster,
    ObservedGang,
    RestartsInPlace,
)
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.pods.head_and_workers import TRACKED
from torchrun_controller.reconcile.pods.lifecycle import (
    PodState,
    alive,
    attempt_of,
    index_of,
    state_of,
)

MACHINE = "this-machine"
C = TypeVar("C", Job, Pod, Service)


class Stop(msgspec.Struct, frozen=True):
    """A pod whose processes are to end. `grace`: seconds between SIGTERM and SIGKILL."""

    pod: Pod
    grace: float


class LocalObjects:
    """The objects of one job. Times are arguments: nothing here reads a clock or starts a process.

    `progress` and `restarts` are the last reports of the launchers, by the UID of their Job, and
    `checkpoints` those of all.
    """

    def __init__(self, job: TorchrunJob, queue: TorchrunQueue) -> None:
        self.job = job
        self.queue = queue
        self.templates: dict[str, JsonObject] = {}  # of pods, by the UID of their Job
        self.annotations: dict[str, dict[str, str]] = {}  # of pods, by their UID
        self.progress: dict[str, Progress] = {}
        self.restarts: dict[str, RestartsInPlace] = {}
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self._jobs: dict[str, Job] = {}
        self._pods: dict[str, Pod] = {}
        self._service: Service | None = None
        self._suffixes = itertools.count(1)

    def observed(self) -> Observed:
        """The input of reconcile."""
        jobs = sorted(self._jobs.values(), key=attempt_of)
        newest = jobs[-1].metadata.uid if jobs else ""
        pods = tuple(self._pods.values())
        workers = tuple(pod for pod in pods if newest and pod.metadata.controlled_by(newest))
        gang = ObservedGang(
            child_jobs=tuple(jobs),
            workers=tuple(sorted(workers, key=index_of)),
            stale_pods=tuple(pod for pod in pods if pod not in workers and alive(pod)),
            service=self._service,
            progress=self.progress.get(newest),
            restarts=self.restarts.get(newest, RestartsInPlace()),
            checkpoints=self.checkpoints,
            has_reported=newest in self.progress or newest in self.restarts,
        )
        cluster = ObservedCluster(installed=Installed())
        return Observed(job=self.job, queue=self.queue, gang=gang, cluster=cluster)

    def find_owner(self, uid: str) -> str | None:
        """The UID of the Job of a pod, which may be deleted; None if the pod has ended."""
        pod = self._pods.get(uid)
        return None if pod is None else pod.metadata.owner_references[0].uid

    def write_status(self, status: TorchrunJobStatus) -> None:
        """Store the status as it would come back from an API server."""
        wire = msgspec.json.decode(msgspec.json.encode(status), type=TorchrunJobStatus)
        self.job = replace(self.job, status=wire)

    def apply(self, write: Apply, now: datetime) -> tuple[Pod, ...]:
        """Create or change an object; returns the pods that are to start."""
        if write.kind is PODS:
            self._annotate(write)
        elif write.kind is SERVICES:
            self._service = self._service or _with_uid(msgspec.convert(write.body, Service), now)
        elif write.kind is JOBS and not write.uid:
            child = _with_uid(msgspec.convert(write.body, Job), now)
            template = object_at(object_at(write.body, "spec"), "template")
            self._jobs[child.metadata.uid], self.templates[child.metadata.uid] = child, template
            return tuple(self._create_pods(child, now))
        return ()  # objects that nothing here reads, such as a NetworkPolicy

    def delete(self, write: Delete, now: datetime) -> tuple[Stop, ...]:
        """Delete an object; returns the pods whose processes are to end."""
        grace = float(30 if write.grace_seconds is None else write.grace_seconds)
        if write.kind is TORCHRUN_JOBS:
            return ()
        if write.kind is PODS and not write.collection:
            return self._terminate([write.uid], grace, now)
        owned = [u for u, pod in self._pods.items() if pod.metadata.controlled_by(write.uid)]
        if not write.collection:
            self._jobs.pop(write.uid, None)
        return self._terminate(owned, grace, now)

    def starts(self, uid: str, now: datetime) -> None:
        """The processes of a pod run."""
        running = ContainerState(running=StateRunning(started_at=now))
        self._set(uid, "Running", running, ready=True)

    def ends(self, uid: str, exit_code: int, message: str, now: datetime) -> tuple[Stop, ...]:
        """The processes of a pod have ended; returns the pods that its Job then ends.

        `message` is the termination message.
        """
        code, number = (exit_code, 0) if exit_code >= 0 else (128 - exit_code, -exit_code)
        end = StateTerminated(exit_code=code, signal=number, message=message, finished_at=now)
        phase: PodPhase = "Failed" if code else "Succeeded"
        self._set(uid, phase, ContainerState(terminated=end), ready=False)
        pod = self._pods[uid]
        # Its Job keeps a pod by a finalizer, so that the end of one that was deleted shows.
        if pod.metadata.terminating and not any(map(pod.metadata.controlled_by, self._jobs)):
            del self._pods[uid]
        return self._end_job(pod, now)

    def _end_job(self, pod: Pod, now: datetime) -> tuple[Stop, ...]:
        """Do what the Job controller does after the end of a pod (backoffLimit 0)."""
        owner = next((u for u in self._jobs if pod.metadata.controlled_by(u)), None)
        if owner is None:
            return ()
        child = self._jobs[owner]
        pods = {u: p for u, p in self._pods.items() if p.metadata.controlled_by(owner)}
        if any(each.status.phase == "Failed" for each in pods.values()):
            if not any(map(alive, pods.values())):
                self._finish(child, "Failed", "BackoffLimitExceeded", now)
            grace = object_at(self.templates[owner], "spec").get("terminationGracePeriodSeconds")
            return self._terminate(pods, float(grace) if isinstance(grace, int) else 30.0, now)
        succeeded = [each for each in pods.values() if each.status.phase == "Succeeded"]
        if len(succeeded) == (child.spec.completions or 1):
            self._finish(child, "Complete", "", now)
        return ()

    def _finish(self, child: Job, kind: str, reason: str, now: datetime) -> None:
        condition = Condition(type=kind, status="True", reason=reason, last_transition_time=now)
        status = replace(child.status, conditions=(*child.status.conditions, condition))
        self._jobs[child.metadata.uid] = replace(child, status=status)

    def _create_pods(self, child: Job, now: datetime) -> Iterable[Pod]:
        template = object_at(self.templates[child.metadata.uid], "metadata")
        for index in range(child.spec.completions or 1):
            name = f"{child.metadata.name}-{index}"
            annotations = {
                **_strings(template.get("annotations")),
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            labels = {
                **_strings(template.get("labels")),
                names.COMPLETION_INDEX_LABEL: str(index),
            }
            owner = {"kind": "Job", "uid": child.metadata.uid, "controller": True}
            body = {
                "metadata": {
                    "name": name,
                    "namespace": child.metadata.namespace,
                    "labels": labels,
                    "annotations": annotations,
                    "finalizers": [TRACKED],
                    "ownerReferences": [{"name": child.metadata.name, **owner}],
                },
                "spec": {"nodeName": MACHINE},
                "status": {"phase": "Pending"},
            }
            pod = _with_uid(msgspec.convert(body, Pod), now)
            self._pods[pod.metadata.uid] = pod
            self.annotations[pod.metadata.uid] = annotations
            yield pod

    def _annotate(self, write: Apply) -> None:
        """Merge annotations: the controller applies all of its own."""
        if write.uid not in self._pods:
            return
        changed = _strings(object_at(write.body, "metadata").get("annotations"))
        annotations = {**self.annotations[write.uid], **changed}
        if names.NOTIFICATION_TIME not in changed:
            annotations.pop(names.NOTIFICATION_TIME, None)
        self.annotations[write.uid] = annotations
        pod = self._pods[write.uid]
        decoded = msgspec.convert(annotations, type(pod.metadata.annotations))
        meta = replace(pod.metadata, annotations=decoded)
        self._pods[write.uid] = replace(pod, metadata=meta)

    def _terminate(self, uids: Iterable[str], grace: float, now: datetime) -> tuple[Stop, ...]:
        stops = []
        for uid in uids:
            pod = self._pods.get(uid)
            if pod is None or state_of(pod) is not PodState.ACTIVE:
                continue
            meta = replace(
                pod.metadata,
                deletion_timestamp=now + timedelta(seconds=grace),
                deletion_grace_period_seconds=int(grace),
            )
            self._pods[uid] = replace(pod, metadata=meta)
            stops.append(Stop(pod, grace))
        return tuple(stops)

    def _set(self, uid: str, phase: PodPhase, state: ContainerState, *, ready: bool) -> None:
        pod = self._pods[uid]
        container = ContainerStatus(name=names.TRAINER_CONTAINER, ready=ready, state=state)
        conditions = (Condition(type="Ready", status="True"),) if ready else ()
        status = replace(
            pod.status, phase=phase, container_statuses=(container,), conditions=conditions
        )
        self._pods[uid] = replace(pod, status=status)


def _with_uid(created: C, now: datetime) -> C:
    """The object as the API server stores it."""
    meta = replace(
        created.metadata,
        uid=str(uuid.uuid4()),
        creation_timestamp=now,
        resource_version="1",
    )
    return replace(created, metadata=meta)


def _strings(value: object) -> dict[str, str]:
    return msgspec.convert(value or {}, dict[str, str])
