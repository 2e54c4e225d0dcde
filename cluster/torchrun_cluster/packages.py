"""Programs that come from Debian packages: found, or installed when we are root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import artefacts
from .errors import ClusterError
from .places import cache_home
from .progress import step

SEARCH_PATH = ":".join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/lib/cni"))

NODE = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ptp": "containernetworking-plugins",
    "host-local": "containernetworking-plugins",
    "portmap": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "openssl": "openssl",
}
"""Program to package, for a node."""

IMAGES = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
"""Program to package, for building images without a Docker engine."""

POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# Made by torchrun_cluster while it installs packages.\nexit 101\n"


def find(program: str) -> str | None:
    """Path of a program, also from the folders that only root has on its PATH."""
    return shutil.which(program, path=SEARCH_PATH)


def missing(needed: Mapping[str, str]) -> list[str]:
    """Names of the packages whose programs are not there."""
    return sorted({package for program, package in needed.items() if find(program) is None})


def ensure(needed: Mapping[str, str]) -> None:
    """Install what is missing when run as root; otherwise raise with the line to run."""
    absent = missing(needed)
    if not absent:
        return
    line = f"apt-get install -y --no-install-recommends {' '.join(absent)}"
    if os.geteuid() != 0 or find("apt-get") is None:
        raise ClusterError(f"missing packages; as root, run: {line}")
    # A second apt-get would fail at once while another one runs.
    with artefacts.locked(cache_home() / "apt"):
        _install(needed, missing(needed))


def _install(needed: Mapping[str, str], absent: Sequence[str]) -> None:
    if not absent:
        return
    with step(f"installing {' '.join(absent)}"), _services_kept_off():
        if not _apt("install", absent, check=False):
            # A machine's package lists may be missing or too old.
            _apt("update", [])
            _apt("install", absent)
        if "containerd" in absent and find("systemctl"):
            # The cluster starts its own; the package's service was not there before.
            subprocess.run(["systemctl", "disable", "containerd"], check=False, capture_output=True)
    if still := missing(needed):
        raise ClusterError(f"these packages lack the expected programs: {' '.join(still)}")


def _apt(verb: str, packages: Sequence[str], *, check: bool = True) -> bool:
    arguments = ["-y", "--no-install-recommends", *packages] if packages else []
    result = subprocess.run(
        ["apt-get", "-q", verb, *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )
    if check and result.returncode:
        raise ClusterError(f"apt-get {verb} failed: {result.stderr.strip()}")
    return result.returncode == 0


@contextmanager
def _services_kept_off() -> Iterator[None]:
    """Keep packages from starting their services (Debian's policy-rc.d), as it was after."""
    ours_from_a_crash = POLICY.exists() and POLICY.read_text() == POLICY_TEXT
    before = None if ours_from_a_crash or not POLICY.exists() else POLICY.read_text()
    POLICY.write_text(POLICY_TEXT)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        if before is None:
            POLICY.unlink()
        else:
            POLICY.write_text(before)
