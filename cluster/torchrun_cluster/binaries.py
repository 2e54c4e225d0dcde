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
FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")


@dataclass(frozen=True)
class Module:
    """A folder with a go.mod and the packages to build from it, by the program's name.

    `version_flags` holds linker flags with the `{version}`, `{major}` and `{minor}` of `pinned`.
    """

    folder: str
    pinned: str
    """The module that gives the programs their version; empty for our own code."""
    packages: Mapping[str, str]
    version_flags: str = ""


MODULES = (
    Module(
        folder="kubernetes",
        pinned=KUBERNETES,
        packages={
            "etcd": "go.etcd.io/etcd/server/v3",
            **{
                name: f"{KUBERNETES}/cmd/{name}"
                for name in (
                    "kube-apiserver",
                    "kube-controller-manager",
                    "kubectl",
                    "kube-scheduler",
                    "kubelet",
                    "kube-proxy",
                )
            },
        },
        # Without these, clients see v0.0.0.
        version_flags=(
            "-X k8s.io/component-base/version.gitVersion={version}"
            " -X k8s.io/component-base/version.gitMajor={major}"
            " -X k8s.io/component-base/version.gitMinor={minor}"
        ),
    ),
    Module("coredns", "github.com/coredns/coredns", {"coredns": "github.com/coredns/coredns"}),
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
    Module("kueue", "sigs.k8s.io/kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}),
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


def ensure(names: Iterable[str]) -> dict[str, Path]:
    """Paths of the named programs, each verified, and built first where that is needed."""
    wanted = list(names)
    paths = {name: _place(_module_of(name)) / name for name in wanted}
    missing = [name for name in wanted if not artefacts.is_whole(paths[name])]
    by_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in missing:
        by_module[_module_of(name).folder].append(name)
    for group in by_module.values():
        _build(_module_of(group[0]), group)
    return paths


def version(module: Module) -> str:
    """The version that go.mod pins, for example v1.35.4."""
    text = (SOURCE / "go" / module.folder / "go.mod").read_text()
    found = re.search(rf"^\s*(?:require )?{re.escape(module.pinned)} (v\S+)", text, re.MULTILINE)
    if not found:
        raise ClusterError(f"cluster/go/{module.folder}/go.mod does not pin {module.pinned}")
    return found[1]


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
    """The cache key: whatever changes the build changes it."""
    digest = hashlib.sha256()
    for part in (*sources, flags.encode(), go_version.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def _module_of(name: str) -> Module:
    for module in MODULES:
        if name in module.packages:
            return module
    raise ClusterError(f"no program is called {name!r}")


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
        cwd=SOURCE / "go" / "kubernetes",
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
        " ".join((*FLAGS, _linker_flags(module), "CGO_ENABLED=0")),
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
    command = ["go", "build", "-v", *FLAGS, "-ldflags", _linker_flags(module)]
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
