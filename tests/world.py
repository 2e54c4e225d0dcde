"""A world of one job for tests of the pure core. It executes Plans and plays cluster and user.

It does what the API server, the Job controller and the kubelet do with the objects of a Plan. Time
passes only if a test moves the clock.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from torchrun_api.json import JsonObject
from torchrun_api.kinds.admission import Admission
from torchrun_api.kinds.core import (
    ContainerState,
    ContainerStatus,
    CoreEvent,
    Job,
    Node,
    NodeCondition,
    NodeMeta,
    NodeSpec,
    NodeStatus,
    ObjectReference,
    Pod,
    StateTerminated,
    StateWaiting,
    Taint,
)
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ChildMeta, Condition, ConditionStatus
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, Kind
from torchrun_controller.reconcile import Defaults, Plan, reconcile
from torchrun_controller.reconcile.gang.gate import REPEAT_SECONDS
from torchrun_controller.reconcile.model.conditions import ADMITTED
from torchrun_controller.reconcile.model.observed import FailedRound, RestartsInPlace, Vanished
from torchrun_controller.reconcile.model.plan import StatusWrite, Write
from torchrun_controller.reconcile.placement import HOSTNAME
from torchrun_controller.reconcile.pods.lifecycle import alive, follows_leader, index_of
from torchrun_controller.reconcile.spec.requests import admission_of, requests_of
from torchrun_controller.reconcile.spec.size import size_of
from world_objects import WorldObjects

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEFAULTS = Defaults(runtime_image="registry.example/torchrun:1")


def make_job(**spec: Any) -> TorchrunJob:
    """A TorchrunJob as the API server would send it."""
    annotations = spec.pop("annotations_", {})
    body: JsonObject = {
        "metadata": {
            "name": "train",
            "namespace": "ml",
            "uid": "uid-train",
            "generation": 1,
            "annotations": annotations,
        },
        "spec": {"jobQueue": "gpu", "command": "python train.py", **spec},
    }
    return msgspec.convert(body, TorchrunJob)


def make_queue(**spec: Any) -> TorchrunQueue:
    """A TorchrunQueue as the API server would send it."""
    body: JsonObject = {
        "metadata": {"name": "gpu", "namespace": "ml", "uid": "uid-gpu"},
        "spec": {"image": "pytorch/pytorch", **spec},
    }
    return msgspec.convert(body, TorchrunQueue)


ZIP: JsonObject = {"workspace": {"enabled": True, "source": "zip"}}


def _before_death(plan: Plan, count: int) -> list[Write]:
    """The first writes of a process that dies before the status, and before what requires it."""
    writes: list[Write] = []
    for write in plan.writes:
        if not isinstance(write, StatusWrite):
            writes.append(write)
        elif write.before_deletes:
            break
    return writes[:count]


class World(WorldObjects):
    """One job, its queue and its objects."""

    def __init__(self, job: TorchrunJob, queue: TorchrunQueue | None) -> None:
        super().__init__(job, queue, START)
        self.defaults = DEFAULTS
        self.plans: list[Plan] = []
        self.failed_rounds: dict[str, tuple[FailedRound, ...]] = {}  # by the UID of the child Job

    def plan(self) -> Plan:
        """The Plan of reconcile now, without executing it."""
        return reconcile(self.observed(), self.now, self.defaults)

    def step(self, writes: int | None = None) -> Plan:
        """Reconcile once and execute the Plan. With `writes`, the process dies after that many."""
        plan = self.plan()
        for write in plan.writes if writes is None else _before_death(plan, writes):
            if not isinstance(write, StatusWrite):
                self.write(write)
            elif write.status is not None:
                self.write_status(write.status)
        self.plans.append(plan)
        return plan

    def settle(self) -> Plan:
        """Reconcile until nothing is left to do, whatever back-off comes before the next gang."""
        plan = self.rest()
        while self.job.status.reason == "BackingOff":
            self.pass_backoff()
            plan = self.rest()
        return plan

    def pass_backoff(self) -> None:
        """Let the back-off pass that comes before the next gang, if there is one."""
        status = self.plan().status or self.job.status
        if status.reason == "BackingOff":
            seconds = self.rest().requeue_after
            assert seconds is not None
            self.pass_time(seconds=seconds)

    def rest(self) -> Plan:
        """Reconcile until nothing is left to do now."""
        for _ in range(10):
            plan = self.step()
            if not plan.applies and not plan.deletes and plan.status is None:
                return plan
        raise AssertionError(f"no rest after ten reconciles: {plan}")

    def settle_twice(self) -> Plan:
        """Settle now and after REPEAT_SECONDS, when every annotation has been written twice."""
        self.settle()
        self.pass_time(seconds=REPEAT_SECONDS)
        return self.settle()

    # Actions of the coordinator

    def admission(self, holds: bool, reason: str, message: str, nodes: int | None) -> None:
        """Set the Admitted condition, and the number of nodes that the quota is charged with."""
        status = self.job.status
        condition = Condition(
            type=ADMITTED, status="True" if holds else "False", reason=reason, message=message
        )
        others = tuple(c for c in status.conditions if c.type != ADMITTED)
        charged = None if nodes is None else replace(self._record(), nodes=nodes, time=self.now)
        self.job = replace(
            self.job, status=replace(status, conditions=(*others, condition), admission=charged)
        )

    def _record(self) -> Admission:
        """The admission record: the existing one, or the size that the spec requests now."""
        present = self.job.status.admission
        if present is not None and present.queue:
            return present
        assert self.queue is not None
        size = size_of(self.job.spec, self.queue.spec)
        return admission_of(requests_of(self.job, self.queue, size), self.queue.metadata.name)

    def admit(self, nodes: int) -> None:
        """Admit the job, or admit it for another size."""
        self.admission(
            True, "Admitted", f"Admitted for {nodes} node{'' if nodes == 1 else 's'}.", nodes
        )

    def preempt(self, by: str = "ml/urgent") -> None:
        """Revoke the admission. The quota stays charged until no pod runs."""
        admission = self.job.status.admission
        nodes = None if admission is None else admission.nodes
        self.admission(False, "Preempted", f"gives way to {by}", nodes)

    # Actions of cluster and user

    def pod(self, name: str, **status: Any) -> None:
        """Change a pod's status."""
        key = (PODS.plural, name)
        pod: Pod = self.objects[key]
        spec = replace(pod.spec, node_name=pod.spec.node_name or "node-1")
        self.objects[key] = replace(pod, spec=spec, status=replace(pod.status, **status))

    def drain(self, name: str) -> None:
        """A drain deletes a pod with its grace period."""
        self.pod(
            name, conditions=(Condition(type="DisruptionTarget", status="True", reason="Drained"),)
        )
        self._ending((PODS.plural, name), 30)

    def node(self, name: str, ready: bool = True, *taints: str, hostname: str = "") -> None:
        """Add or change a Node."""
        nodes = self.nodes if self.nodes is not None else {}
        before = nodes.get(name)
        status: ConditionStatus = "True" if ready else "Unknown"
        changed = self.now
        if before is not None and before.status.conditions[0].status == status:
            changed = before.status.conditions[0].last_transition_time or self.now
        condition = NodeCondition(type="Ready", status=status, last_transition_time=changed)
        meta = NodeMeta(name=name, labels={HOSTNAME: hostname})
        spec = NodeSpec(taints=tuple(Taint(key=key, effect="NoExecute") for key in taints))
        self.nodes = nodes | {
            name: Node(metadata=meta, spec=spec, status=NodeStatus(conditions=(condition,)))
        }

    def place(self, pod: str, node: str) -> None:
        """Bind a pod to a node."""
        stored: Pod = self.objects[PODS.plural, pod]
        spec = replace(stored.spec, node_name=node)
        self.objects[PODS.plural, pod] = replace(stored, spec=spec)

    def remove(self, *pods: str) -> None:
        """The kubelet removes pods: all their containers have ended."""
        for name in pods:
            del self.objects[PODS.plural, name]

    def vanish(self, *pods: str) -> None:
        """Pods vanish from the API: force-deleted, or deleted with their Node."""
        for name in pods:
            pod = self.objects.pop((PODS.plural, name))
            if alive(pod) and pod.spec.node_name:
                self.vanished = (*self.vanished, Vanished(pod, self.now))

    def placed(self, name: str) -> None:
        """The scheduler sets PodScheduled to True."""
        condition = Condition(type="PodScheduled", status="True", last_transition_time=self.now)
        self.pod(name, conditions=(condition,))

    def not_placed(self, verdict: str, *indexes: int, pod: str = "", **condition: Any) -> None:
        """The scheduler cannot schedule these workers, or one other pod."""
        unscheduled = Condition(
            type="PodScheduled",
            status="False",
            **{"reason": "Unschedulable", "message": verdict, **condition},
        )
        names = [pod] if pod else [self.workers()[index].metadata.name for index in indexes]
        for name in names:
            stored: Pod = self.objects[PODS.plural, name]
            status = replace(stored.status, phase="Pending", conditions=(unscheduled,))
            spec = replace(stored.spec, node_name="")
            self.objects[PODS.plural, name] = replace(stored, spec=spec, status=status)

    def warn(self, kind: Kind[Any], name: str, reason: str, message: str) -> None:
        """A controller or the kubelet writes an event regarding an object."""
        uid = self.objects[kind.plural, name].metadata.uid
        regarding = ObjectReference(kind=kind.kind, namespace="ml", name=name, uid=uid)
        meta = ChildMeta(
            name=f"{name}.{len(self.warnings)}", namespace="ml", creation_timestamp=self.now
        )
        self.warnings.append(
            CoreEvent(metadata=meta, involved_object=regarding, reason=reason, message=message)
        )

    def workers(self) -> list[Pod]:
        """Pods of the latest attempt, by index."""
        return sorted(self.observed().gang.workers, key=lambda p: (index_of(p), p.metadata.name))

    def leaders(self) -> list[Pod]:
        """Pods of the latest attempt that do not follow the leader of their gang."""
        return [pod for pod in self.workers() if not follows_leader(pod)]

    def all_workers(self, phase: str) -> None:
        """Move every worker to a phase."""
        for pod in self.workers():
            self.pod(pod.metadata.name, phase=phase)

    def sync_done(self) -> None:
        """The last sync pod succeeds."""
        self.pod(self.observed().workspace.sync_pods[-1].metadata.name, phase="Succeeded")

    def takes_upload(self, *, ready: bool = True) -> None:
        """The last sync pod runs, and accepts uploads if `ready`."""
        name = self.observed().workspace.sync_pods[-1].metadata.name
        sync = ContainerStatus(name="sync", ready=ready)
        self.pod(name, phase="Running", container_statuses=(sync,))

    def claim_is(self, phase: str, storage_class: str | None = "fast") -> None:
        """Set the phase and the storage class of the workspace PVC."""
        key = (CLAIMS.plural, "train-workspace")
        claim = self.objects[key]
        self.objects[key] = replace(
            claim,
            spec=replace(claim.spec, storage_class_name=storage_class),
            status=replace(claim.status, phase=phase),
        )

    def serves(
        self, ip: str = "10.0.0.7", manifest: str = "ef" * 32, revision: int = 1, **fields: str
    ) -> None:
        """The last sync pod, a serve pod, has its workspace and serves it."""
        result = {"sha256": "aa", "manifest": manifest, "revision": revision, **fields}
        message = msgspec.json.encode(result).decode()
        ended = ContainerState(
            terminated=StateTerminated(exit_code=0, message=message, finished_at=self.now)
        )
        self.pod(
            self.observed().workspace.sync_pods[-1].metadata.name,
            phase="Running",
            pod_ip=ip,
            conditions=(Condition(type="Ready", status="False", reason="ContainersNotReady"),),
            container_statuses=(
                ContainerStatus(name="serve", ready=True),
                ContainerStatus(name="sync", state=ended),
            ),
        )

    def setup_done(self) -> None:
        """The last setup pod succeeds."""
        self.pod(self.observed().workspace.setup_pods[-1].metadata.name, phase="Succeeded")

    def end_container(self, pod: str, container: str, **ended: Any) -> None:
        """A container terminates and its pod fails."""
        state = ContainerState(terminated=StateTerminated(**ended))
        status = ContainerStatus(name=container, state=state)
        self.pod(pod, phase="Failed", container_statuses=(status,))

    def container_waits(self, pod: str, reason: str, message: str = "") -> None:
        """A container does not start."""
        state = ContainerState(waiting=StateWaiting(reason=reason, message=message))
        self.pod(pod, container_statuses=(ContainerStatus(name="trainer", state=state),))

    def restart_in_place(self, node: int = 0, lost: bool = False, **failure: Any) -> None:
        """A rank fails, and the launchers start the ranks in the same pods.

        The controller gets the report, unless it is `lost`.
        """
        child = self.observed().gang.current_job.metadata.uid
        rounds = (*self.failed_rounds.get(child, ()), self._failed_round(child, node, failure))
        self.failed_rounds[child] = rounds
        if not lost:
            restarts = RestartsInPlace(count=len(rounds), last=rounds[-3:])
            self.reports.put_restarts(("ml", "train"), child, restarts)

    def _failed_round(self, child: str, node: int, failure: dict[str, Any]) -> FailedRound:
        number = len(self.failed_rounds.get(child, ()))
        default = FailedRound(
            round=number,
            node=node,
            seconds=20.0,
            rank=node,
            exit_code=1,
            reason="Exception",
            message="KeyError: 'x'",
            time=self.now,
        )
        return replace(default, **failure)

    def job_condition(self, kind: str, reason: str = "", message: str = "", **fields: Any) -> None:
        """The Job controller sets a condition of the latest child Job."""
        child: Job = self.observed().gang.child_jobs[-1]
        condition = Condition(type=kind, status="True", reason=reason, message=message, **fields)
        status = replace(child.status, conditions=(*child.status.conditions, condition))
        version = str(int(child.metadata.resource_version or 0) + 1)
        meta = replace(child.metadata, resource_version=version)
        self.objects[JOBS.plural, child.metadata.name] = replace(
            child, metadata=meta, status=status
        )

    def delete_child_job(self) -> None:
        """The child Job is deleted, and its pods are already gone."""
        child: Job = self.observed().gang.child_jobs[-1]
        del self.objects[JOBS.plural, child.metadata.name]
        for key, value in list(self.objects.items()):
            if isinstance(value, Pod) and value.metadata.controlled_by(child.metadata.uid):
                del self.objects[key]

    def spec(self, **changes: Any) -> None:
        """The user edits the spec."""
        meta = replace(self.job.metadata, generation=self.job.metadata.generation + 1)
        self.job = replace(self.job, metadata=meta, spec=replace(self.job.spec, **changes))

    def suspend(self) -> None:
        """The user suspends the job, its containers stop, and the controller sees it."""
        self.spec(suspend=True)
        self.settle()
        self.containers_stop()
        self.settle()

    def resume(self) -> None:
        """The user resumes the job, and the controller sees it."""
        self.spec(suspend=False)
        self.settle()

    def pass_time(self, **delta: float) -> None:
        """Move the clock."""
        self.now += timedelta(**delta)

    @property
    def phase(self) -> str | None:
        """status.phase."""
        return self.job.status.phase

    def condition(self, kind: str) -> Condition:
        """The condition of this type."""
        return next(c for c in self.job.status.conditions if c.type == kind)
