"""A node of a local cluster: namespaces, network, configuration files, container runtime.

The processes of a node share a network, a mount and a PID namespace. Their first process, the
anchor, keeps the namespaces; when it ends the kernel ends every process in them, containers
included, and with the last one go all mounts, devices and iptables rules. So taking a node down
is a matter of ending processes, and nothing of it shows on the host meanwhile.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from . import cgroups, components, oci, packages, processes
from .api import wait_until
from .artefacts import locked
from .components import PAUSE_IMAGE
from .errors import ClusterError
from .places import cache_home, state_home
from .state import NODE_ADDRESS, Node, State

ANCHOR = "anchor"
HIDDEN = ("/run", "/var/lib", "/var/log")
"""Folders of the host of which each node has its own."""
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
STORAGE_CLASS = "local-path"

# The anchor, as the first process of its PID namespace, also reaps what others leave.
WAIT_FOR_EVER = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
)


def check_places() -> None:
    """Raise when the cache or the state would be hidden from the nodes' processes."""
    for place in (cache_home(), state_home()):
        for hidden in HIDDEN:
            if place.is_relative_to(hidden):
                raise ClusterError(
                    f"{place} is below {hidden}, which a node has for itself; "
                    "set TORCHRUN_CACHE (and TORCHRUN_STATE) to another folder"
                )


def start_namespaces(node: Node) -> None:
    """Make the cgroup and the namespaces, with the node's address and folders in them."""
    state, anchor = node.cluster, node.component(ANCHOR)
    cgroups.create(node.cgroup)
    ready = node.folder / "namespaces.ready"
    ready.unlink(missing_ok=True)
    # Each start is a reboot to the kubelet.
    boot = node.folder / "boot-id"
    for name in ("var-lib", "var-log"):
        (node.folder / name).mkdir(parents=True, exist_ok=True)
    script = f"""set -e
{cgroups.enter_script(node.cgroup)}
mount --make-rshared /
mount -t proc proc /proc
cat /proc/sys/kernel/random/uuid > '{boot}'
mount --bind '{boot}' /proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind '{node.folder}/var-lib' /var/lib
mount --bind '{node.folder}/var-log' /var/log
ip link set lo up
ip address add {node.address}/32 dev lo
echo 1 > /proc/sys/net/ipv4/ip_forward
touch '{ready}'
exec '{sys.executable}' -c "{WAIT_FOR_EVER}"
"""
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    program = node.folder / "namespaces.sh"
    program.write_text(script)
    name_anchor = ["env", f"{processes.COMPONENT}={anchor}", f"PATH={packages.SEARCH_PATH}"]
    log = state.log(anchor)
    command = [*unshare, *name_anchor, "sh", str(program)]
    maker = node.component("namespaces")
    processes.start(state.folder, maker, command, log)

    check = processes.alive_check(state.folder, (maker,), lambda _: log)
    wait_until(ready.exists, "the namespaces", check)


def connect(node: Node) -> None:
    """Connect the node to the others, on a bridge in the first node's network namespace.

    Nodes have one address each, on `lo`; routes lead to the nodes and to their pods.
    """
    first, *_ = nodes = node.cluster.nodes
    bridge, uplink = "nodes", "eth0"
    _in_network(
        first,
        f"ip link show {bridge} 2>/dev/null || ip link add {bridge} type bridge",
        f"ip link set {bridge} up",
        _unplug(node),
        f"ip link add {node.name} type veth peer name {uplink} netns {anchor_pid(node)}",
        f"ip link set {node.name} master {bridge} up",
        *_routes(first, node, bridge),
    )
    to_others = [_routes(node, other, uplink) for other in nodes if other != node]
    _in_network(node, f"ip link set {uplink} up", *(line for lines in to_others for line in lines))


def disconnect(node: Node) -> None:
    """Let no packet of the node reach another, not even for connections that the kernel closes."""
    _in_network(node.cluster.nodes[0], _unplug(node))


def _unplug(node: Node) -> str:
    # A device can outlive its node for minutes: open connections keep the network namespace.
    return f"! ip link show {node.name} 2>/dev/null || ip link delete {node.name}"


def _routes(node: Node, to: Node, device: str) -> tuple[str, str]:
    return (
        f"ip route replace {to.address} dev {device} src {node.address}",
        f"ip route replace {to.pods} via {to.address} dev {device} src {node.address}",
    )


def _in_network(node: Node, *lines: str) -> None:
    """Run shell commands in the network namespace alone: pids in them are those of the host."""
    enter = ["nsenter", "--target", str(anchor_pid(node)), "--net"]
    script = "\n".join((f"PATH='{packages.SEARCH_PATH}'", "set -e", *lines))
    result = subprocess.run(
        [*enter, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise ClusterError(f"cannot connect {node.name}: {result.stderr.strip()}")


def anchor_pid(node: Node) -> int:
    """The process whose namespaces are the node's."""
    anchors = processes.of_cluster(node.cluster.folder, node.component(ANCHOR))
    if not anchors:
        name = node.cluster.spec.name
        raise ClusterError(
            f"{node.name} of cluster {name!r} has no namespaces: take it down and up"
        )
    return anchors[0].pid


def inside(node: Node) -> list[str]:
    """A command that runs the rest of its arguments in the node's cgroup and namespaces."""
    script = f'{cgroups.enter_script(node.cgroup)}exec "$@"'
    pid = str(anchor_pid(node))
    path = f"PATH={packages.SEARCH_PATH}"
    enter = ["nsenter", "--target", pid, "--net", "--mount", "--pid", "env", path]
    return ["sh", "-c", script, "sh", *enter]


def forwarder_command(state: State) -> list[str]:
    """The process that gives the host its local port."""
    program = Path(__file__).with_name("forward.py")
    target = [str(part) for part in components.api_endpoint(state)]
    pid = str(anchor_pid(state.nodes[0]))
    return [sys.executable, str(program), str(state.ports.api), pid, *target]


def write_configuration(node: Node) -> None:
    """Write the configuration files of a node's own components."""
    plugins = packages.find("ptp")
    assert plugins
    cni = node.folder / "cni"
    cni.mkdir(parents=True)
    _write_json(cni / "10-pods.conflist", _cni(node))
    text = _containerd_config(Path(plugins).parent, cni, _claim_store(node))
    (node.folder / "containerd.toml").write_text(text)
    _write_json(node.folder / "kubelet.json", _kubelet_config(node))


def write_shared_configuration(state: State) -> None:
    """Write the configuration files of DNS and volumes; every node mounts the volumes' folder."""
    (state.folder / "Corefile").write_text(_corefile(state))
    volumes = state.folder / "volumes"
    volumes.mkdir()
    program = "/pause"
    _write_json(
        state.folder / "local-path.json",
        {
            "sharedFileSystemPath": str(volumes),
            "setupCommand": program,
            "teardownCommand": program,
        },
    )
    _write_json(state.folder / "volume-pod.json", _volume_pod())


def storage_class() -> dict[str, object]:
    """The default StorageClass; it binds at once, for every access mode."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "rancher.io/local-path",
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


def containerd_answers(node: Node) -> bool:
    """Whether the runtime serves its socket."""
    return _ctr(node, "version").returncode == 0


def forget_containers(node: Node) -> bool:
    """Delete what an earlier cluster left in the image store; True if there was something."""
    listed = _ctr(node, "containers", "list", "--quiet").stdout.split()
    if listed:
        _ctr(node, "containers", "delete", *listed)
    return bool(listed)


def import_image(node: Node, archive: Path) -> list[str]:
    """Import the archive's images unless the same ones are there; returns the names imported."""
    images = oci.images_in(archive)
    if not images:
        raise ClusterError(f"no image in {archive} has a name; push it with oci-archive:FILE:NAME")
    present = {
        tuple(line.split()[index] for index in (0, 2))
        for line in _ctr(node, "images", "list").stdout.splitlines()[1:]
    }
    new = [image.name for image in images if (image.name, image.digest) not in present]
    if new:
        with archive.open("rb") as content:
            result = subprocess.run(
                [*inside(node), *_CTR, "images", "import", "-"],
                stdin=content,
                capture_output=True,
                text=True,
                check=False,
            )
        if result.returncode:
            raise ClusterError(f"importing {archive} failed: {result.stderr.strip()}")
    return new


_CTR = ("ctr", "--namespace", "k8s.io", "--address", CONTAINERD_SOCKET)


def _ctr(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*inside(node), *_CTR, *arguments], capture_output=True, text=True, check=False
    )


def _claim_store(node: Node) -> Path:
    """A store of images for this node alone, kept when it goes: imports are costly.

    The first number whose last user has no containerd running any more is taken, for all nodes.
    """
    stores, state = cache_home() / "containerd", node.cluster
    with locked(stores):
        number = 0
        while True:
            owner = stores / f"{number}.owner"
            user = Path(owner.read_text()) if owner.exists() else state.folder
            if user == state.folder or not processes.of_cluster(user, "containerd"):
                owner.write_text(str(state.folder))
                break
            number += 1
        store = stores / str(number)
        if node.number == 1:
            return store
        own = stores / f"{number}-{node.name}"
        if store.exists() and not own.exists():
            _copy_store(store, own)
        return own


def _copy_store(store: Path, copy: Path) -> None:
    """Copy the images of a store that is not in use.

    Files of images never change, so links take the place of copies, except for the databases.
    """
    unfinished = copy.with_name(f"{copy.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--link", str(store), str(unfinished)], check=True)
    for database in unfinished.glob("io.containerd.*/*.db"):
        own = database.with_suffix(".copy")
        shutil.copy2(database, own)
        own.replace(database)
    unfinished.rename(copy)


def _cni(node: Node) -> dict[str, object]:
    # Routed, not bridged: replies of a Service's pods pass iptables without br_netfilter.
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pods, "gateway": node.address}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.3.1",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd_config(plugins: Path, cni: Path, store: Path) -> str:
    # restrict_oom_score_adj: machines without CAP_SYS_RESOURCE cannot lower the score, and every
    # sandbox would fail. internal.v1.opt would make /opt/containerd on the host.
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{store}"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs"]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true

[{cri}.cni]
  bin_dir = "{plugins}"
  conf_dir = "{cni}"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def _corefile(state: State) -> str:
    kubeconfig = state.component_kubeconfig("coredns")
    # There is no way out of the network namespace, so other names do not exist.
    return f"""cluster.local in-addr.arpa ip6.arpa {{
    bind {NODE_ADDRESS}
    errors
    kubernetes {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
. {{
    bind {NODE_ADDRESS}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def _kubelet_config(node: Node) -> dict[str, object]:
    pki, own = node.cluster.certificates, node.component("kubelet")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"{own}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{own}.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "maxPods": 200,
        # The machine's disk is not the cluster's to judge, and images cannot be fetched again.
        "localStorageCapacityIsolation": False,
        "evictionHard": dict.fromkeys(
            ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%"
        ),
        "imageGCHighThresholdPercent": 100,
    }


def _volume_pod() -> dict[str, object]:
    container = {"name": "volume", "image": PAUSE_IMAGE, "imagePullPolicy": "Never"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "volume"},
        "spec": {"containers": [container]},
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
