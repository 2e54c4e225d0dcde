"""The fields of core kinds that the project reads.

Watch events are decoded directly into these types, so other fields use no memory.
"""

from datetime import datetime
from typing import Literal

from msgspec import field

from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ChildMeta, Condition, ConditionStatus, Wire

PodPhase = Literal["", "Pending", "Running", "Succeeded", "Failed", "Unknown"]


class StateWaiting(Wire, frozen=True, kw_only=True):
    """A container that has not started, and why."""

    reason: str = ""
    message: str = ""


class StateRunning(Wire, frozen=True, kw_only=True):
    """A container that runs."""

    started_at: datetime | None = None


class StateTerminated(Wire, frozen=True, kw_only=True):
    """A container that ended; `message` is its termination message."""

    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ContainerState(Wire, frozen=True, kw_only=True):
    """Exactly one of the three is set by the kubelet."""

    waiting: StateWaiting | None = None
    running: StateRunning | None = None
    terminated: StateTerminated | None = None


class ContainerStatus(Wire, frozen=True, kw_only=True):
    """One entry of `status.containerStatuses` or `status.initContainerStatuses`."""

    name: str = ""
    ready: bool = False
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class Resources(Wire, frozen=True, kw_only=True):
    """Quantities by the name of the resource."""

    requests: dict[str, int | str] = field(default_factory=dict)
    limits: dict[str, int | str] = field(default_factory=dict)


class Container(Wire, frozen=True, kw_only=True):
    """What a container requests; `restart_policy` Always makes an init container a sidecar."""

    resources: Resources = Resources()
    restart_policy: str = ""


class PodRequests(Wire, frozen=True, kw_only=True):
    """The part of a v1 PodSpec that says what the pod requests; `resources` are of all of it."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, int | str] = field(default_factory=dict)
    resources: Resources = Resources()


class PodSpec(PodRequests, frozen=True, kw_only=True):
    """Where the pod runs, and what it requests there."""

    node_name: str = ""


class PodStatus(Wire, frozen=True, kw_only=True):
    """Status of the pod, as kubelet and scheduler write it."""

    phase: PodPhase = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Wire, frozen=True, kw_only=True):
    """v1 Pod."""

    metadata: ChildMeta = ChildMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class ClaimSource(Wire, frozen=True, kw_only=True):
    """The PVC of a volume."""

    claim_name: str = ""


class JobVolume(Wire, frozen=True, kw_only=True):
    """A volume of a pod, if it is a PVC."""

    persistent_volume_claim: ClaimSource | None = None


class JobTemplateSpec(PodRequests, frozen=True, kw_only=True):
    """What the pods of a Job mount, request and tolerate."""

    tolerations: tuple[JsonObject, ...] = ()
    volumes: tuple[JobVolume, ...] = ()


class JobTemplate(Wire, frozen=True, kw_only=True):
    """The template of the pods of a Job."""

    spec: JobTemplateSpec = JobTemplateSpec()


class JobSpec(Wire, frozen=True, kw_only=True):
    """The size of an Indexed Job."""

    parallelism: int = 1
    completions: int | None = None
    suspend: bool = False
    template: JobTemplate = JobTemplate()


class JobStatus(Wire, frozen=True, kw_only=True):
    """Counts and conditions, as the Job controller writes them."""

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()


class Job(Wire, frozen=True, kw_only=True):
    """batch/v1 Job."""

    metadata: ChildMeta = ChildMeta()
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()


class ClaimSpec(Wire, frozen=True, kw_only=True):
    """The requests of a PVC."""

    storage_class_name: str | None = None
    access_modes: tuple[str, ...] = ()


class ClaimStatus(Wire, frozen=True, kw_only=True):
    """Whether the claim is bound."""

    phase: Literal["", "Pending", "Bound", "Lost"] = ""


class PersistentVolumeClaim(Wire, frozen=True, kw_only=True):
    """v1 PersistentVolumeClaim."""

    metadata: ChildMeta = ChildMeta()
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class Service(Wire, frozen=True, kw_only=True):
    """v1 Service: only its existence is read."""

    metadata: ChildMeta = ChildMeta()


class NetworkPolicy(Wire, frozen=True, kw_only=True):
    """networking.k8s.io/v1 NetworkPolicy: only its existence is read."""

    metadata: ChildMeta = ChildMeta()


class KubernetesSecret(Wire, frozen=True, kw_only=True):
    """v1 Secret. The controller creates some, and reads none."""

    metadata: ChildMeta = ChildMeta()


class SchedulingGroupStatus(Wire, frozen=True, kw_only=True):
    """Status of a gang, as its scheduler writes it. KAI has a separate list of conditions."""

    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    scheduling_conditions: tuple[Condition, ...] = ()


class SchedulingGroup(Wire, frozen=True, kw_only=True):
    """PodGroup or Workload: the object of a gang scheduler for one gang."""

    metadata: ChildMeta = ChildMeta()
    status: SchedulingGroupStatus = SchedulingGroupStatus()


class ObjectReference(Wire, frozen=True, kw_only=True):
    """v1 ObjectReference: the object of an event."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class CoreEvent(Wire, frozen=True, kw_only=True):
    """v1 Event, as controllers and kubelet write them."""

    metadata: ChildMeta = ChildMeta()
    involved_object: ObjectReference = ObjectReference()
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None


class NodeMeta(Wire, frozen=True, kw_only=True):
    """`metadata` of a node, which has no namespace."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    creation_timestamp: datetime | None = None


class Taint(Wire, frozen=True, kw_only=True):
    """One entry of `spec.taints`."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Wire, frozen=True, kw_only=True):
    """The fields that keep pods away from the node."""

    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class NodeCondition(Wire, frozen=True, kw_only=True):
    """A condition without its message and its heartbeat, which changes all the time."""

    type: str = ""
    status: ConditionStatus = "Unknown"
    last_transition_time: datetime | None = None


class NodeStatus(Wire, frozen=True, kw_only=True):
    """Status of the node, as the kubelet or the node lifecycle controller writes it."""

    conditions: tuple[NodeCondition, ...] = ()
    allocatable: dict[str, str] = field(default_factory=dict)


class Node(Wire, frozen=True, kw_only=True):
    """v1 Node. `doubted_until` is the cache's: the silence of the machine counts from then on."""

    metadata: NodeMeta = NodeMeta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    doubted_until: datetime | None = field(default=None, name="__doubtedUntil__")
