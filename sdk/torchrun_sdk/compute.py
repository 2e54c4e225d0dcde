"""The resources of one worker, and the number of workers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from torchrun_sdk import images
from torchrun_sdk.errors import UsageError
from torchrun_sdk.spec import CPU_ONLY

Seconds = Union[int, float, str]
FRAMEWORKS = ("pytorch", "ray")
OPERATORS = ("kuberay",)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SHARED = ("ReadWriteMany", "ReadOnlyMany")


def seconds(value: Seconds, name: str) -> float:
    """90, "90s", "5m" and "1h30m" as seconds. name: of the parameter. Raises UsageError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    text = str(value)
    if re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        parts = re.findall(r"([\d.]+)([hms])", text)
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    raise UsageError(f'{name} is {value!r}. It must be seconds or a duration such as "1h30m".')


class Volume:
    """A PVC that every pod mounts; created if it does not exist."""

    def __init__(
        self,
        name: str,
        mount_path: str = "/data",
        size: str = "10Gi",
        access_mode: str = "ReadWriteMany",
        storage_class: str | None = None,
    ) -> None:
        if not mount_path.startswith("/"):
            raise UsageError(f"Volume {name}: mount_path {mount_path!r} must start with /.")
        self.name = name
        self.mount_path = mount_path
        self.size = size
        self.access_mode = access_mode
        self.storage_class = storage_class

    def claim(self) -> dict[str, Any]:
        """v1 PersistentVolumeClaim."""
        spec: dict[str, Any] = {
            "accessModes": [self.access_mode],
            "resources": {"requests": {"storage": self.size}},
        }
        if self.storage_class is not None:
            spec["storageClassName"] = self.storage_class
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": self.name},
            "spec": spec,
        }

    def in_pod(self) -> dict[str, Any]:
        """v1 Volume."""
        return {"name": self.name, "persistentVolumeClaim": {"claimName": self.name}}

    def mount(self) -> dict[str, Any]:
        """v1 VolumeMount."""
        return {"name": self.name, "mountPath": self.mount_path}

    def check(self, pods: int) -> None:
        """Raises UsageError if the access mode does not support this number of pods."""
        if pods > 1 and self.access_mode not in _SHARED:
            raise UsageError(
                f"Volume {self.name} has access_mode {self.access_mode}, which does not support"
                f' {pods} pods. Use access_mode="ReadWriteMany" with a shared storage class'
                " (NFS, CephFS, JuiceFS)."
            )


class Distribution(NamedTuple):
    """The number of workers and their framework; framework None: one plain pod."""

    framework: str | None = None
    workers: int = 1
    quorum_timeout: float = 600.0
    worker_node_options: dict[str, Any] | None = None
    operator: str | None = None

    @property
    def nodes(self) -> int:
        """Pods of the job. Ray has a head and workers; an operator creates them outside the job."""
        return 1 if self.operator else self.workers + (self.framework == "ray")


class Compute:
    """The resources of the pod of one worker.

    gpus: per node. cpus: 4 or "500m". memory: "16Gi". Each is at most that of a node of the queue,
    which is also its default. idle_time: how long the pods wait for another call. queue, namespace:
    defaults are TORCHRUN_QUEUE and TORCHRUN_NAMESPACE, else the only queue of kubectl's namespace.
    launch_timeout: limit until all pods run. max_restarts: new gangs after a pod failed; a deleted
    pod is always replaced, and a call that raised is never repeated.
    """

    def __init__(
        self,
        *,
        gpus: int | None = None,
        cpus: int | float | str | None = None,
        memory: str | None = None,
        image: str = "",
        env: dict[str, str] | None = None,
        volumes: Sequence[Volume] = (),
        queue: str = "",
        namespace: str = "",
        idle_time: Seconds = 0,
        launch_timeout: Seconds = "30m",
        max_restarts: int = 0,
    ) -> None:
        self.gpus = _count(gpus, "gpus")
        self.cpus = None if cpus is None else str(cpus)
        self.memory = memory
        self.image = image
        self.env = dict(env or {})
        self.volumes: list[Volume] = list(volumes)
        self.queue = queue or os.environ.get("TORCHRUN_QUEUE", "")
        self.namespace = namespace or os.environ.get("TORCHRUN_NAMESPACE", "")
        self.idle_time = seconds(idle_time, "idle_time")
        self.launch_timeout = seconds(launch_timeout, "launch_timeout")
        self.max_restarts = _count(max_restarts, "max_restarts") or 0
        self.distribution = Distribution()

    def distribute(
        self,
        framework: str = "pytorch",
        workers: int = 1,
        *,
        quorum_timeout: Seconds = "10m",
        worker_node_options: dict[str, Any] | None = None,
        operator: str | None = None,
    ) -> Compute:
        """A copy for this number of workers. operator: "kuberay" for Ray. Raises UsageError."""
        if framework not in FRAMEWORKS:
            raise UsageError(f"framework is {framework!r}. It must be one of {FRAMEWORKS}.")
        if not isinstance(workers, int) or workers < 1:
            raise UsageError(f"workers is {workers!r}. It must be an integer of at least 1.")
        if operator is not None and (framework != "ray" or operator not in OPERATORS):
            raise UsageError(
                f"operator is {operator!r} with framework {framework!r}. It requires framework"
                f" 'ray' and must be one of {OPERATORS}."
            )
        for volume in self.volumes:
            volume.check(workers + (framework == "ray"))  # Ray has a head
        other = Compute.__new__(Compute)
        other.__dict__.update(self.__dict__)
        quorum = seconds(quorum_timeout, "quorum_timeout")
        options = _checked(framework, worker_node_options or {})
        other.distribution = Distribution(framework, workers, quorum, options, operator)
        return other

    def variables(self) -> list[dict[str, Any]]:
        """The environment of a container, as a list of v1 EnvVar.

        The kubelet replaces `$$` in values by `$`, and expands `$(NAME)`.
        """
        return [
            {"name": key, "value": str(value).replace("$", "$$")} for key, value in self.env.items()
        ]

    def node_resources(self) -> dict[str, Any]:
        """spec.nodeResources of the TorchrunJob; empty with TORCHRUN_SDK_CPU_ONLY."""
        if self.distribution.operator:  # the pods of the operator have the resources
            return self._resources({"gpus": 0})
        return self._resources(self.distribution.worker_node_options or {})

    def head_resources(self) -> dict[str, Any] | None:
        """The resources of Ray's head; None if they equal those of the workers."""
        if self.distribution.operator:
            return None
        options = self.distribution.worker_node_options or {}
        # With GPUs only for the workers, the head does not get those of the queue.
        own = self._resources({"gpus": 0} if "gpus" in options and self.gpus is None else {})
        return own if own != self.node_resources() else None

    def _resources(self, instead: dict[str, Any]) -> dict[str, Any]:
        if cpu_only():
            return {}
        resources = {"gpus": self.gpus, "cpus": self.cpus, "memory": self.memory, **instead}
        return {name: value for name, value in resources.items() if value is not None}

    def resolved_image(self) -> str:
        """The image, "" for that of the queue."""
        return images.resolve(self.image)


def cpu_only() -> bool:
    """Whether TORCHRUN_SDK_CPU_ONLY is set: the cluster has no GPUs."""
    return os.environ.get(CPU_ONLY, "") not in ("", "0", "false")


def _checked(framework: str, options: dict[str, Any]) -> dict[str, Any]:
    """Validate worker_node_options, which replace resources of the Compute for the workers."""
    if options and (framework != "ray" or set(options) - {"gpus", "cpus", "memory"}):
        raise UsageError(
            f"worker_node_options are {sorted(options)} with framework {framework!r}. They require"
            " framework 'ray' and accept only gpus, cpus and memory."
        )
    _count(options.get("gpus"), "worker_node_options gpus")
    return {key: str(value) if key == "cpus" else value for key, value in options.items()}


def _count(value: int | None, name: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{name} is {value!r}. It must be an integer of at least 0.")
    return value
