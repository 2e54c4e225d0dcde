"""The kinds that the project reads or writes, with their REST paths and Python types.

The kinds of a gang scheduler are in its file in `reconcile/schedulers`.
"""

from typing import Any, TypeAlias

from torchrun_api.kinds.core import (
    CoreEvent,
    Job,
    KubernetesSecret,
    NetworkPolicy,
    Node,
    PersistentVolumeClaim,
    Pod,
    SchedulingGroup,
    Service,
)
from torchrun_api.kinds.extras import KaiQueue
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.kind import Kind as Kind
from torchrun_api.kinds.kind import Object as Object
from torchrun_api.kinds.queue import TorchrunQueue

TORCHRUN_JOBS = Kind("torchrun.ai", "v1alpha1", "torchrunjobs", "TorchrunJob", TorchrunJob)
TORCHRUN_QUEUES = Kind("torchrun.ai", "v1alpha1", "torchrunqueues", "TorchrunQueue", TorchrunQueue)
PODS = Kind("", "v1", "pods", "Pod", Pod)
JOBS = Kind("batch", "v1", "jobs", "Job", Job)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", PersistentVolumeClaim)
SERVICES = Kind("", "v1", "services", "Service", Service)
NETWORK_POLICIES = Kind(
    "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", NetworkPolicy
)
SECRETS = Kind("", "v1", "secrets", "Secret", KubernetesSecret)
EVENTS = Kind("", "v1", "events", "Event", CoreEvent)
NODES = Kind("", "v1", "nodes", "Node", Node)
KAI_QUEUES = Kind("scheduling.run.ai", "v2", "queues", "Queue", KaiQueue)
KAI_TOPOLOGIES = Kind("kai.scheduler", "v1alpha1", "topologies", "Topology", SchedulingGroup)
UserObject: TypeAlias = TorchrunJob | TorchrunQueue


def kind_of(obj: UserObject) -> Kind[Any]:
    """The kind of an object that users write."""
    return TORCHRUN_JOBS if isinstance(obj, TorchrunJob) else TORCHRUN_QUEUES
