"""What a cluster is (its specification) and where its files stand."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path

from .artefacts import locked
from .errors import ClusterError
from .places import state_home

FIRST_PORT = 26443
"""Ports are taken from here upwards: below the kernel's range for outgoing connections."""
LAST_PORT = 32000

NODE_ADDRESS = "10.244.0.1"
"""The first node's, and so that of the DNS server and the API server, for pods and nodes."""
MAX_NODES = 16


class Size(Enum):
    """How much of a cluster is started."""

    CONTROL_PLANE = "control-plane"
    """etcd, API server, controller manager on 127.0.0.1: no pods run, no root needed."""
    NODE = "node"
    """A whole cluster, each node in namespaces of its own; needs root."""


@dataclass(frozen=True)
class Spec:
    """What the caller asked for. `port` 0 means any free one, `kubernetes` "" the default."""

    name: str
    size: Size
    port: int = 0
    scheduler: bool = False
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kubernetes: str = ""
    nodes: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", self.name):
            raise ClusterError(
                f"cluster name {self.name!r}: use 1 to 32 lowercase letters, digits and dashes"
            )
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"{self.nodes} nodes: use 1 to {MAX_NODES}")
        if self.nodes > 1 and self.size is not Size.NODE:
            raise ClusterError("a control plane has no nodes; leave out --size control-plane")

    @property
    def components(self) -> tuple[str, ...]:
        """The cluster's long-running processes, in the order of their start."""
        if self.size is Size.NODE:
            return (
                *("anchor", "forwarder", "etcd", "containerd", "kube-apiserver"),
                *("kube-controller-manager", "kube-scheduler", "coredns", "kubelet"),
                *("kube-proxy", "local-path-provisioner"),
                *(
                    component_of(part, number)
                    for number in range(2, self.nodes + 1)
                    for part in NODE_COMPONENTS
                ),
            )
        scheduler = ("kube-scheduler",) if self.scheduler else ()
        return ("etcd", "kube-apiserver", "kube-controller-manager", *scheduler)


@dataclass(frozen=True)
class Ports:
    """Local ports: the API server's (for the host), etcd's two, and one for an addon's webhooks."""

    api: int
    etcd: int
    peer: int
    webhook: int


@dataclass(frozen=True)
class State:
    """The content of a cluster's cluster.json; `complete` is set at the end of `up`.

    `addons` names those that were installed and the long-running processes of each.
    """

    spec: Spec
    ports: Ports
    complete: bool = False
    addons: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def components(self) -> tuple[str, ...]:
        """All long-running processes, those of addons last."""
        return (*self.spec.components, *self.added)

    @property
    def added(self) -> tuple[str, ...]:
        """The long-running processes of addons."""
        return tuple(component for parts in self.addons.values() for component in parts)

    @property
    def folder(self) -> Path:
        """Everything of this cluster stands below it."""
        return folder_of(self.spec.name)

    @property
    def certificates(self) -> Path:
        """CA, certificates and keys."""
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The cluster administrator's kubeconfig, for the host."""
        return self.folder / "kubeconfig"

    @property
    def context(self) -> str:
        """What kubeconfigs call the cluster."""
        return f"torchrun-{self.spec.name}"

    @property
    def server(self) -> str:
        """The API server's URL, for the host."""
        return f"https://127.0.0.1:{self.ports.api}"

    @property
    def cgroup(self) -> str:
        """Name of the cluster's cgroup."""
        return cgroup_of(self.folder)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes; the first one has the control plane, too."""
        return tuple(Node(self, number) for number in range(1, self.spec.nodes + 1))

    def place_of(self, component: str) -> tuple[str, Node]:
        """`kubelet@node-2` as `kubelet` and the node it runs on; by default that is the first."""
        part, _, name = component.partition("@")
        return part, self.node(name or node_name(1))

    def node(self, name: str) -> Node:
        """The node of that name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"cluster {self.spec.name!r} has no node {name!r}")

    def log(self, component: str) -> Path:
        """Where a component's output goes."""
        return self.folder / "logs" / f"{component}.log"

    def component_kubeconfig(self, component: str) -> Path:
        """A component's own kubeconfig."""
        return self.folder / f"{component}.kubeconfig"

    def write(self) -> None:
        """Write cluster.json whole or not at all."""
        temporary = self.folder / "cluster.json.tmp"
        temporary.write_text(json.dumps(asdict(self), default=lambda size: size.value, indent=2))
        temporary.replace(self.folder / "cluster.json")

    def having(self, addons: Mapping[str, Sequence[str]]) -> State:
        """The same cluster with exactly these addons; written down."""
        changed = replace(self, addons=addons)
        changed.write()
        return changed

    def completed(self) -> State:
        """The same cluster, up."""
        return replace(self, complete=True)


NODE_COMPONENTS = ("anchor", "containerd", "kubelet", "kube-proxy")
"""The long-running processes that every node has."""


def node_name(number: int) -> str:
    """`node`, `node-2`, `node-3`."""
    return "node" if number == 1 else f"node-{number}"


def component_of(part: str, number: int) -> str:
    """A node's own component: `kubelet` of the first node, `kubelet@node-2` of the second."""
    return part if number == 1 else f"{part}@{node_name(number)}"


@dataclass(frozen=True)
class Node:
    """One node of a cluster; `number` counts from 1."""

    cluster: State
    number: int

    @property
    def name(self) -> str:
        """The name of its Node object."""
        return node_name(self.number)

    @property
    def address(self) -> str:
        """Its InternalIP, and the gateway of its pods."""
        return f"10.244.{self.number - 1}.1"

    @property
    def pods(self) -> str:
        """The addresses of its pods."""
        return f"10.244.{self.number - 1}.0/24"

    @property
    def folder(self) -> Path:
        """Configuration files, /var/lib and /var/log of the node."""
        return self.cluster.folder / self.name

    @property
    def cgroup(self) -> str:
        """Path of the node's cgroup, below the cluster's."""
        return f"{self.cluster.cgroup}/{self.name}"

    def component(self, part: str) -> str:
        """The name of one of NODE_COMPONENTS on this node."""
        return component_of(part, self.number)


def folder_of(name: str) -> Path:
    """The folder of the cluster of that name."""
    return state_home() / name


def cgroup_of(folder: Path) -> str:
    """Name of a cluster's cgroup: that of its folder, as two users may both have a `demo`."""
    suffix = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    return f"torchrun-{folder.name}-{suffix}"


def read(name: str) -> State | None:
    """The recorded state; None where there is none or where `up` was cut off in writing it."""
    try:
        content = json.loads((folder_of(name) / "cluster.json").read_text())
        spec = content["spec"]
        return State(
            Spec(**{**spec, "size": Size(spec["size"])}),
            Ports(**content["ports"]),
            content["complete"],
            content["addons"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def names() -> list[str]:
    """All clusters that have a folder, running or not."""
    try:
        return sorted(path.name for path in state_home().iterdir() if path.is_dir())
    except FileNotFoundError:
        return []


def create(spec: Spec) -> State:
    """Claim ports that no other cluster has and that are free now, and record the cluster."""
    with locked(state_home()):
        others = (read(name) for name in names() if name != spec.name)
        used_ports = {port for other in others if other for port in asdict(other.ports).values()}
        if spec.port and (spec.port in used_ports or not _is_free(spec.port)):
            raise ClusterError(f"port {spec.port} is in use; choose another one with --port")
        free = (
            port
            for port in range(FIRST_PORT, LAST_PORT)
            if port not in used_ports and port != spec.port and _is_free(port)
        )
        ports = Ports(spec.port or next(free), next(free), next(free), next(free))
        state = State(spec, ports)
        state.folder.mkdir(parents=True, exist_ok=True)
        state.write()
    return state


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
