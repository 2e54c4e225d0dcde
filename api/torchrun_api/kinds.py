"""The kinds that the project reads or writes, with their REST paths and Python types.

The kinds of a gang scheduler are in its file in `reconcile/schedulers`.
"""

from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from torchrun_api.core import (
    CoreEvent,
    Job,
    NetworkPolicy,
    Node,
    NodeMeta,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.extras import ConfigMap, KaiQueue, QueueClaim
from torchrun_api.job import TorchrunJob
from torchrun_api.meta import ChildMeta, ObjectMeta
from torchrun_api.queue import TorchrunQueue


class Object(Protocol):
    """Any object of the API as it is kept in a store."""

    @property
    def metadata(self) -> ObjectMeta | ChildMeta | NodeMeta:
        """Name, namespace, UID and resourceVersion."""


T = TypeVar("T", bound=Object)


class Kind(Struct, Generic[T], frozen=True):
    """A kind: group, version and plural give its REST path, `type` its decoded slice."""

    group: str
    version: str
    plural: str
    kind: str
    type: type[T]

    @property
    def api_version(self) -> str:
        """`v1` or `group/version`, as it stands in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """`pods` or `jobs.batch`: the name in RBAC rules, metrics and messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """REST path of the collection (of all namespaces where none is given) or of one object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{scope}/{self.plural}{tail}"


TORCHRUN_JOBS = Kind("torchrun.ai", "v1alpha1", "torchrunjobs", "TorchrunJob", TorchrunJob)
TORCHRUN_QUEUES = Kind("torchrun.ai", "v1alpha1", "torchrunqueues", "TorchrunQueue", TorchrunQueue)
PODS = Kind("", "v1", "pods", "Pod", Pod)
JOBS = Kind("batch", "v1", "jobs", "Job", Job)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", PersistentVolumeClaim)
SERVICES = Kind("", "v1", "services", "Service", Service)
NETWORK_POLICIES = Kind(
    "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", NetworkPolicy
)
EVENTS = Kind("", "v1", "events", "Event", CoreEvent)
NODES = Kind("", "v1", "nodes", "Node", Node)
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", ConfigMap)
QUEUE_CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", QueueClaim)
KAI_QUEUES = Kind("scheduling.run.ai", "v2", "queues", "Queue", KaiQueue)
KAI_TOPOLOGIES = Kind("kai.scheduler", "v1alpha1", "topologies", "Topology", SchedulingGroup)
UserObject: TypeAlias = TorchrunJob | TorchrunQueue


def kind_of(obj: UserObject) -> Kind[Any]:
    """The kind of an object that users write."""
    return TORCHRUN_JOBS if isinstance(obj, TorchrunJob) else TORCHRUN_QUEUES
