"""The node of a local cluster: namespaces, configuration files, container runtime.

The cluster's processes share a network, a mount and a PID namespace. Their first process, the
anchor, keeps the namespaces; when it ends the kernel ends every process in them, containers
included, and with the last one go all mounts, devices and iptables rules. So taking a node down
is a matter of ending processes, and nothing of it shows on the host meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from . import cgroups, components, oci, packages, processes
from .api import wait_until
from .artefacts import locked
from .components import PAUSE_IMAGE
from .errors import ClusterError
from .places import cache_home, state_home
from .state import NODE_ADDRESS, State

ANCHOR = "anchor"
HIDDEN = ("/run", "/var/lib", "/var/log")
"""Folders of the host that the cluster's processes see as their own."""
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
STORAGE_CLASS = "local-path"

# The anchor, as the first process of its PID namespace, also reaps what others leave.
WAIT_FOR_EVER = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
)


def check_places() -> None:
    """Raise when the cache or the state would be hidden from the cluster's processes."""
    for place in (cache_home(), state_home()):
        for hidden in HIDDEN:
            if place.is_relative_to(hidden):
                raise ClusterError(
                    f"{place} is below {hidden}, which a node has for itself; "
                    "set TORCHRUN_CACHE (and TORCHRUN_STATE) to another folder"
                )


def start_namespaces(state: State) -> None:
    """Make the cgroup and the namespaces, with the node's address and folders in them."""
    cgroups.create(state.cgroup)
    ready = state.folder / "namespaces.ready"
    for name in ("var-lib", "var-log"):
        (state.folder / name).mkdir(parents=True)
    script = f"""set -e
{cgroups.enter_script(state.cgroup)}
mount --make-rshared /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind '{state.folder}/var-lib' /var/lib
mount --bind '{state.folder}/var-log' /var/log
ip link set lo up
ip address add {NODE_ADDRESS}/32 dev lo
echo 1 > /proc/sys/net/ipv4/ip_forward
touch '{ready}'
exec '{sys.executable}' -c "{WAIT_FOR_EVER}"
"""
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    program = state.folder / "namespaces.sh"
    program.write_text(script)
    name_anchor = ["env", f"{processes.COMPONENT}={ANCHOR}", f"PATH={packages.SEARCH_PATH}"]
    log = state.log(ANCHOR)
    command = [*unshare, *name_anchor, "sh", str(program)]
    processes.start(state.folder, "namespaces", command, log)

    def check() -> None:
        if not processes.of_cluster(state.folder, "namespaces"):
            raise ClusterError(f"cannot make namespaces: {processes.tail(log)}")

    wait_until(ready.exists, "the namespaces", check, timeout=20)


def anchor_pid(state: State) -> int:
    """The process whose namespaces are the cluster's."""
    anchors = processes.of_cluster(state.folder, ANCHOR)
    if not anchors:
        raise ClusterError(f"cluster {state.spec.name!r} has no namespaces: take it down and up")
    return anchors[0].pid


def inside(state: State) -> list[str]:
    """A command that runs the rest of its arguments in the cluster's cgroup and namespaces."""
    script = f'{cgroups.enter_script(state.cgroup)}exec "$@"'
    pid = str(anchor_pid(state))
    path = f"PATH={packages.SEARCH_PATH}"
    enter = ["nsenter", "--target", pid, "--net", "--mount", "--pid", "env", path]
    return ["sh", "-c", script, "sh", *enter]


def forwarder_command(state: State) -> list[str]:
    """The process that gives the host its local port."""
    program = Path(__file__).with_name("forward.py")
    target = [str(part) for part in components.api_endpoint(state)]
    return [sys.executable, str(program), str(state.ports.api), str(anchor_pid(state)), *target]


def write_configuration(state: State) -> None:
    """Write the configuration files of the node's components."""
    plugins = packages.find("ptp")
    assert plugins
    cni = state.folder / "cni"
    cni.mkdir()
    _write_json(cni / "10-pods.conflist", _cni())
    text = _containerd_config(Path(plugins).parent, cni, _claim_store(state))
    (state.folder / "containerd.toml").write_text(text)
    (state.folder / "Corefile").write_text(_corefile(state))
    _write_json(state.folder / "kubelet.json", _kubelet_config(state))
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


def containerd_answers(state: State) -> bool:
    """Whether the runtime serves its socket."""
    return _ctr(state, "version").returncode == 0


def forget_containers(state: State) -> bool:
    """Delete what an earlier cluster left in the image store; True if there was something."""
    listed = _ctr(state, "containers", "list", "--quiet").stdout.split()
    if listed:
        _ctr(state, "containers", "delete", *listed)
    return bool(listed)


def import_image(state: State, archive: Path) -> list[str]:
    """Import the archive's images unless the same ones are there; returns the names imported."""
    images = oci.images_in(archive)
    if not images:
        raise ClusterError(f"no image in {archive} has a name; push it with oci-archive:FILE:NAME")
    present = {
        tuple(line.split()[index] for index in (0, 2))
        for line in _ctr(state, "images", "list").stdout.splitlines()[1:]
    }
    new = [image.name for image in images if (image.name, image.digest) not in present]
    if new:
        with archive.open("rb") as content:
            result = subprocess.run(
                [*inside(state), *_CTR, "images", "import", "-"],
                stdin=content,
                capture_output=True,
                text=True,
                check=False,
            )
        if result.returncode:
            raise ClusterError(f"importing {archive} failed: {result.stderr.strip()}")
    return new


_CTR = ("ctr", "--namespace", "k8s.io", "--address", CONTAINERD_SOCKET)


def _ctr(state: State, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*inside(state), *_CTR, *arguments], capture_output=True, text=True, check=False
    )


def _claim_store(state: State) -> Path:
    """A store of images for this cluster alone, kept when it goes: imports are costly.

    The first store whose last user has no containerd running any more is taken.
    """
    stores = cache_home() / "containerd"
    with locked(stores):
        number = 0
        while True:
            owner = stores / f"{number}.owner"
            user = Path(owner.read_text()) if owner.exists() else state.folder
            if user == state.folder or not processes.of_cluster(user, "containerd"):
                owner.write_text(str(state.folder))
                return stores / str(number)
            number += 1


def _cni() -> dict[str, object]:
    # Routed, not bridged: replies of a Service's pods pass iptables without br_netfilter.
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": "10.244.0.0/24", "gateway": NODE_ADDRESS}]],
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


def _kubelet_config(state: State) -> dict[str, object]:
    pki = state.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{state.cgroup}",
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
