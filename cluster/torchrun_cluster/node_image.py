"""A node image for kind without a registry: Debian, kind's own files, and pinned Go modules.

Where a registry can be reached, kind downloads `kindest/node`. Here the same is put together:
systemd, containerd, runc and CNI plugins of Debian, the files under images/base of kind's Go
module, kubeadm, kubelet, kubectl, and the images of the control plane, each of one program.
kindnetd is missing, and the CNI configuration is static instead: a cluster has one node.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from . import artefacts, binaries, images, oci, packages
from .errors import ClusterError
from .places import SOURCE, cache_home
from .progress import step

REPOSITORY = "localhost/torchrun-kind-node"
SUITE = "bookworm"
"""The last Debian whose systemd runs on cgroup version 1 without being forced to."""
PACKAGES = (
    *("systemd-sysv", "conntrack", "iptables", "iproute2", "ethtool", "kmod", "jq", "procps"),
    *("ca-certificates", "containerd", "runc", "containernetworking-plugins", "socat"),
)
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
PROGRAMS = (
    *CONTROL_PLANE,
    *("kubeadm", "kubelet", "kubectl", "kube-proxy"),
    *("coredns", "pause", "local-path-provisioner"),
)
RELEASE = binaries.DEFAULT_KUBERNETES
DOCKERFILE = SOURCE / "images" / "node" / "Dockerfile"
KIND_FILES = Path("images", "base", "files")
STORAGE_SOURCE = Path("pkg", "build", "nodeimage", "const_storage.go")
EXECUTABLE = ("usr/local/bin", "kind/bin")
PROVISIONER = "storageProvisionerImage"
HELPER = "storageHelperImage"
KUBELET_SETTINGS: Mapping[str, object] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    # As in the local cluster: see node.py.
    "failCgroupV1": False,
    "localStorageCapacityIsolation": False,
}
NETWORK: Mapping[str, object] = {
    "cniVersion": "0.3.1",
    "name": "kindnet",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-ipam-state",
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}
NETWORK_MANIFEST = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: static-cni
  namespace: kube-system
data:
  configuration: /etc/cni/net.d/10-kindnet.conflist of the node image
"""


def ensure() -> str:
    """The name of the node image in Docker's store, built where it is not there."""
    programs = binaries.ensure(PROGRAMS, RELEASE)
    kind = binaries.module_folder("kind")
    recipe = [Path(__file__).read_bytes(), DOCKERFILE.read_bytes(), kind.name.encode()]
    recipe += [artefacts.recorded_sha256(path).encode() for path in programs.values()]
    key = images.digest(recipe)
    tag = f"{REPOSITORY}:{key}"
    if images.docker_image(tag):
        return tag
    place = cache_home() / "images" / f"kind-node-{key}"
    with artefacts.locked(place):
        if images.docker_image(tag):
            return tag
        context = place / "context"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        try:
            (context / "rootfs.tar").hardlink_to(_rootfs())
            _write_context(context, programs, kind)
            _build(context, programs, kind, tag)
        finally:
            shutil.rmtree(context)
    return tag


def sandbox_setting(config: str, pause: str) -> str:
    """kind's containerd configuration for this pause image.

    Containers keep the OOM score of their parents: root without CAP_SYS_RESOURCE cannot lower it.
    """
    config, sandboxes = re.subn(r'sandbox_image = "[^"]*"', f'sandbox_image = "{pause}"', config)
    config, scores = re.subn(
        r"restrict_oom_score_adj = \w+", "restrict_oom_score_adj = true", config
    )
    if (sandboxes, scores) != (1, 1):
        raise ClusterError("kind's containerd configuration has another form than expected")
    return config


def storage_manifest(source: str) -> tuple[str, dict[str, str]]:
    """kind's default-storage.yaml and its images by constant, from const_storage.go."""
    names = dict(re.findall(r'^const (\w+) = "([^"]+)"$', source, re.MULTILINE))
    literal = re.search(
        r"^const defaultStorageManifest = `(.*)`\s*\Z", source, re.DOTALL | re.MULTILINE
    )
    if not literal or not {PROVISIONER, HELPER} <= names.keys():
        raise ClusterError("kind's const_storage.go has another form than expected")
    manifest = re.sub(r"` \+ (\w+) \+ `", lambda match: names[match[1]], literal[1])
    return manifest, names


def _rootfs() -> Path:
    key = images.digest([" ".join((SUITE, *PACKAGES, *images.DOCUMENTATION)).encode()])
    rootfs = cache_home() / "images" / f"kind-node-rootfs-{key}" / "rootfs.tar"
    with artefacts.locked(rootfs.parent):
        if not artefacts.is_whole(rootfs):
            packages.ensure({"mmdebstrap": "mmdebstrap"})
            temporary = rootfs.with_name("building.tar")
            with step(f"installing Debian {SUITE} for {REPOSITORY}"):
                images.debootstrap(temporary, SUITE, PACKAGES)
            artefacts.adopt(temporary, rootfs)
    return rootfs


def _write_context(context: Path, programs: Mapping[str, Path], kind: Path) -> None:
    node = context / "root" / "node"
    shutil.copytree(kind / KIND_FILES, node, copy_function=shutil.copyfile)
    for path in node.rglob("*"):
        inside = str(path.relative_to(node).parent)
        path.chmod(0o755 if path.is_dir() or inside in EXECUTABLE else 0o644)
    (node / "usr" / "local" / "bin" / "clean-install").unlink()
    shutil.rmtree(node / "LICENSES")
    (node / "usr" / "bin").mkdir()
    for name in ("kubeadm", "kubelet", "kubectl"):
        shutil.copy(programs[name], node / "usr" / "bin" / name)
    shutil.copy(programs["kube-proxy"], context / "root" / "kube-proxy")

    config = node / "etc" / "containerd" / "config.toml"
    config.write_text(sandbox_setting(config.read_text(), _required(programs)["pause"]))
    settings = node / "etc" / "kubernetes" / "kubelet.conf.d"
    network = node / "etc" / "cni" / "net.d"
    manifests = node / "kind" / "manifests"
    for folder in (settings, network, manifests):
        folder.mkdir(parents=True)
    (settings / "10-node.conf").write_text(json.dumps(KUBELET_SETTINGS))
    flags = node / "etc" / "default" / "kubelet"
    flags.write_text(f"{flags.read_text().strip()} --config-dir=/etc/kubernetes/kubelet.conf.d\n")
    (network / "10-kindnet.conflist").write_text(json.dumps(NETWORK))
    (manifests / "default-cni.yaml").write_text(NETWORK_MANIFEST)
    manifest, _ = storage_manifest((kind / STORAGE_SOURCE).read_text())
    (manifests / "default-storage.yaml").write_text(manifest)
    (node / "kind" / "version").write_text(binaries.version_of("kubelet", RELEASE))


def _build(context: Path, programs: Mapping[str, Path], kind: Path, tag: str) -> None:
    archives = context / "archives"
    archives.mkdir()
    shutil.copy(DOCKERFILE, context / "Dockerfile")
    required = _required(programs)
    for name in CONTROL_PLANE:
        archive = archives / f"{name}.tar"
        oci.write_program_image(archive, required[name], programs[name], "usr/local/bin")
    oci.write_program_image(archives / "pause.tar", required["pause"], programs["pause"])
    oci.write_program_image(archives / "coredns.tar", required["coredns"], programs["coredns"])
    _, storage = storage_manifest((kind / STORAGE_SOURCE).read_text())
    provisioner = programs["local-path-provisioner"]
    archive = archives / "local-path-provisioner.tar"
    oci.write_program_image(archive, storage[PROVISIONER], provisioner, "usr/local/bin")
    with step(f"building {tag}"):
        for target, name in (("kube-proxy", required["kube-proxy"]), ("tools", storage[HELPER])):
            images.docker("build", "--quiet", "--target", target, "--tag", name, str(context))
            images.docker("save", "--output", str(archives / f"{target}.tar"), name)
        images.docker("build", "--quiet", "--tag", tag, str(context))


def _required(programs: Mapping[str, Path]) -> dict[str, str]:
    """The images that kubeadm expects, by program: kube-apiserver, etcd, coredns, pause, ..."""
    release = binaries.version_of("kubeadm", RELEASE)
    listed = subprocess.run(
        [programs["kubeadm"], "config", "images", "list", "--kubernetes-version", release],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {name.rpartition("/")[2].partition(":")[0]: name for name in listed}
