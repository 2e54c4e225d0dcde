"""The cluster's programs, built once from pinned Go modules and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import artefacts
from .errors import ClusterError
from .places import SOURCE, cache_home
from .progress import step

KUBERNETES = "k8s.io/kubernetes"
# Without these, clients see v0.0.0.
KUBERNETES_VERSION = (
    "-X k8s.io/component-base/version.gitVersion={version}"
    " -X k8s.io/component-base/version.gitMajor={major}"
    " -X k8s.io/component-base/version.gitMinor={minor}"
)
FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")


@dataclass(frozen=True)
class Module:
    """A folder with a go.mod and the packages to build from it, by the program's name.

    `version_flags` holds linker flags with the `{version}`, `{major}` and `{minor}` of `pinned`,
    `tags` what is built or left out.
    """

    folder: str
    pinned: str
    """The module that gives the programs their version; empty for our own code."""
    packages: Mapping[str, str]
    version_flags: str = ""
    tags: str = ""


def _kubernetes(minor: str) -> Module:
    parts = ("apiserver", "controller-manager", "scheduler", "proxy")
    programs = (*(f"kube-{part}" for part in parts), "kubectl", "kubelet")
    return Module(
        folder=f"kubernetes-{minor}",
        pinned=KUBERNETES,
        packages={name: f"{KUBERNETES}/cmd/{name}" for name in programs},
        version_flags=KUBERNETES_VERSION,
    )


DEFAULT_KUBERNETES = "1.37"
KUBERNETES_RELEASES: Mapping[str, Module] = {
    minor: _kubernetes(minor) for minor in ("1.33", "1.34", "1.35", "1.36", "1.37")
}

MODULES = (
    Module("etcd", "go.etcd.io/etcd/server/v3", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module("coredns", "github.com/coredns/coredns", {"coredns": "."}),
    Module(
        "local-path",
        "github.com/rancher/local-path-provisioner",
        {"local-path-provisioner": "github.com/rancher/local-path-provisioner"},
        "-X main.VERSION={version}",
    ),
    Module(
        "kwok",
        "sigs.k8s.io/kwok",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        "-X sigs.k8s.io/kwok/pkg/consts.Version={version}",
    ),
    Module(
        "helm",
        "helm.sh/helm/v3",
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        "-X helm.sh/helm/v3/internal/version.version={version}",
    ),
    Module(
        "kubeadm",
        KUBERNETES,
        {"kubeadm": f"{KUBERNETES}/cmd/kubeadm"},
        KUBERNETES_VERSION,
    ),
    Module("kind", "sigs.k8s.io/kind", {"kind": "sigs.k8s.io/kind"}),
    Module(
        "versitygw",
        "github.com/versity/versitygw",
        {"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
        "-X main.Version={version}",
    ),
    Module(
        "volcano",
        "volcano.sh/volcano",
        {
            "volcano-scheduler": "volcano.sh/volcano/cmd/scheduler",
            "volcano-controllers": "volcano.sh/volcano/cmd/controller-manager",
        },
    ),
    Module(
        "prometheus",
        "github.com/prometheus/prometheus",
        {
            "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
            "promtool": "github.com/prometheus/prometheus/cmd/promtool",
        },
        "-X github.com/prometheus/common/version.Version={version}",
        # Targets are named in files alone.
        tags="remove_all_sd",
    ),
    Module("kueue", "sigs.k8s.io/kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}),
    Module(
        "scheduler-plugins",
        "sigs.k8s.io/scheduler-plugins",
        {"coscheduling-scheduler": "sigs.k8s.io/scheduler-plugins/cmd/scheduler"},
    ),
    Module(
        "kai",
        "github.com/NVIDIA/KAI-scheduler",
        {
            "kai-scheduler": "github.com/NVIDIA/KAI-scheduler/cmd/scheduler",
            "kai-binder": "github.com/NVIDIA/KAI-scheduler/cmd/binder",
        },
    ),
    Module(
        "kuberay",
        "github.com/ray-project/kuberay/ray-operator",
        {"kuberay-operator": "github.com/ray-project/kuberay/ray-operator"},
    ),
    Module(
        "jobset",
        "sigs.k8s.io/jobset",
        {"jobset": "sigs.k8s.io/jobset"},
        "-X sigs.k8s.io/jobset/pkg/version.GitVersion={version}",
    ),
    Module(
        "krew",
        "sigs.k8s.io/krew",
        {"krew": "sigs.k8s.io/krew/cmd/krew"},
        "-X sigs.k8s.io/krew/internal/version.gitTag={version}",
    ),
    Module(
        "actionlint",
        "github.com/rhysd/actionlint",
        {"actionlint": "github.com/rhysd/actionlint/cmd/actionlint"},
        "-X github.com/rhysd/actionlint.version={version}",
    ),
    Module("pause", "", {"pause": "."}),
)

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
NODE = (
    *CONTROL_PLANE,
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "local-path-provisioner",
    "pause",
)


def wanted_kubernetes(environment: Mapping[str, str] = os.environ) -> str:
    """The release, for example 1.37, that KUBERNETES asks for. Raises ClusterError."""
    version = environment.get("KUBERNETES") or DEFAULT_KUBERNETES
    if version not in KUBERNETES_RELEASES:
        releases = ", ".join(KUBERNETES_RELEASES)
        raise ClusterError(f"KUBERNETES is {version!r}: it must be one of {releases}")
    return version


def ensure(names: Iterable[str], kubernetes: str = "") -> dict[str, Path]:
    """Paths of the named programs, each verified, and built first where that is needed.

    `kubernetes` is the release of those that are its own; "" is what KUBERNETES asks for.
    """
    release = kubernetes or wanted_kubernetes()
    modules = {name: _module_of(name, release) for name in names}
    paths = {name: _place(module) / name for name, module in modules.items()}
    by_module: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in paths.items():
        if not artefacts.is_whole(path):
            by_module[modules[name].folder].append(name)
    for group in by_module.values():
        _build(modules[group[0]], group)
    return paths


def absent(names: Iterable[str]) -> list[str]:
    """The named programs that `ensure` would build."""
    release = wanted_kubernetes()
    modules = {name: _module_of(name, release) for name in names}
    return [name for name in modules if not artefacts.is_whole(_place(modules[name]) / name)]


def version(module: Module) -> str:
    """The version that go.mod pins, for example v1.37.2. Raises ClusterError if it pins none."""
    text = (SOURCE / "go" / module.folder / "go.mod").read_text()
    pin = re.search(rf"^\s*(?:require )?{re.escape(module.pinned)} (v\S+)", text, re.MULTILINE)
    if not pin:
        raise ClusterError(f"cluster/go/{module.folder}/go.mod does not pin {module.pinned}")
    return pin[1]


def version_of(program: str, kubernetes: str = "") -> str:
    """The version of a program, for example v1.37.2; see `ensure`."""
    return version(_module_of(program, kubernetes or wanted_kubernetes()))


def module_folder(program: str) -> Path:
    """The folder of the Go module that the program is built from, fetched where it is not there."""
    module = _module_of(program)
    result = subprocess.run(
        ["go", "mod", "download", "-json", module.pinned],
        cwd=SOURCE / "go" / module.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ClusterError(f"`go mod download {module.pinned}` failed: {result.stderr.strip()}")
    return Path(json.loads(result.stdout)["Dir"])


def key(sources: Iterable[bytes], flags: str, go_version: str) -> str:
    """The cache key, which depends on all inputs of the build."""
    digest = hashlib.sha256()
    for part in (*sources, flags.encode(), go_version.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def _module_of(name: str, kubernetes: str = DEFAULT_KUBERNETES) -> Module:
    for module in (KUBERNETES_RELEASES[kubernetes], *MODULES):
        if name in module.packages:
            return module
    raise ClusterError(f"unknown program {name!r}")


def _flags(module: Module) -> tuple[str, ...]:
    return (*FLAGS, "-tags", module.tags) if module.tags else FLAGS


def _linker_flags(module: Module) -> str:
    if not module.version_flags:
        return "-s -w"
    pinned = version(module)
    major, minor = pinned.removeprefix("v").split(".")[:2]
    return f"-s -w {module.version_flags.format(version=pinned, major=major, minor=minor)}"


@cache
def _go_version() -> str:
    go = shutil.which("go")
    if not go:
        raise ClusterError(
            "the cluster's programs are built from Go modules, and there is no `go` on the PATH; "
            "install Go 1.26 or later (https://go.dev/dl)"
        )
    # Asked for in the module's folder: there Go may switch to the version that go.mod asks for.
    result = subprocess.run(
        [go, "env", "GOVERSION", "GOOS", "GOARCH"],
        cwd=SOURCE / "go" / KUBERNETES_RELEASES[DEFAULT_KUBERNETES].folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ClusterError(f"`go env` failed: {result.stderr.strip()}")
    return " ".join(result.stdout.split())


def _place(module: Module) -> Path:
    folder = SOURCE / "go" / module.folder
    sources = (folder / "go.mod", folder / "go.sum", *sorted(folder.glob("*.go")))
    build_key = key(
        (source.read_bytes() for source in sources),
        " ".join((*_flags(module), _linker_flags(module), "CGO_ENABLED=0")),
        _go_version(),
    )
    return cache_home() / "bin" / f"{module.folder}-{build_key}"


def _build(module: Module, names: list[str]) -> None:
    place = _place(module)
    with artefacts.locked(place):
        # Another process may have built them while this one waited for the lock.
        names = [name for name in names if not artefacts.is_whole(place / name)]
        if not names:
            return
        for stale in place.glob("building-*"):
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix="building-", dir=place) as temporary:
            for name in names:
                built = Path(temporary) / name
                _go_build(module, name, built)
                artefacts.adopt(built, place / name)


def _go_build(module: Module, name: str, target: Path) -> None:
    command = ["go", "build", "-v", *_flags(module), "-ldflags", _linker_flags(module)]
    with (
        step(f"building {name} (cluster/go/{module.folder})") as current,
        subprocess.Popen(
            [*command, "-o", str(target), module.packages[name]],
            cwd=SOURCE / "go" / module.folder,
            env={**os.environ, "CGO_ENABLED": "0"},
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            current.note = f"{len(lines)} packages"
    if process.returncode:
        raise ClusterError(
            f"`go build {module.packages[name]}` failed in cluster/go/{module.folder}:\n"
            + "".join(lines[-15:])
            + "If modules could not be fetched, see `go env GOPROXY`; then run the command again."
        )
