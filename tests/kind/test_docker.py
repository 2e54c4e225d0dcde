"""A Docker engine started by hand: containers, images, and nothing left of it on the host.

They use the engine that answers, if there is one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun_cluster.engine import docker_answers

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "cluster")}
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "requirements", "api", "controller", "runtime")
TAG = "localhost/torchrun-test:docker"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 and not docker_answers(), reason="no Docker engine, and not root"
    ),
]


def cluster_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torchrun_cluster", *arguments]


def with_docker(script: str) -> str:
    """Run a shell script whose `docker` reaches an engine, and return its stdout."""
    ended = subprocess.run(
        cluster_command("with-docker", "sh", "-euc", script),
        cwd=ROOT,
        env={**ENVIRONMENT, "BASE_IMAGE": os.environ.get("BASE_IMAGE", "localhost/torchrun-base")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def host() -> list[str]:
    """What of the host an engine changes: interfaces, rules, mounts, cgroups, forwarding."""
    rules = [
        subprocess.run([f"{table}-save"], capture_output=True, text=True, check=False).stdout
        for table in ("iptables", "ip6tables")
    ]
    docker_rules = [line for text in rules for line in text.splitlines() if "ocker" in line]
    return [
        *sorted(path.name for path in Path("/sys/class/net").iterdir()),
        *docker_rules,
        *sorted(
            line.split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "docker" in line
        ),
        *sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/torchrun-docker-*")),
        Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    ]


def test_the_controllers_image_is_built_by_docker_and_runs() -> None:
    before = host()
    inputs = " ".join(f"--input={name}" for name in INPUTS)
    image_command = f"{sys.executable} -m torchrun_cluster image"
    output = with_docker(
        f"archive=$({image_command} build --tag {TAG} {inputs})\n"
        f"{image_command} size $archive\n"
        f"{image_command} cat $archive /opt/torchrun/sbom.cdx.json\n"
        "docker load --input $archive\n"
        f"docker run --rm {TAG} torchrun-controller --version\n"
        f"docker run --rm --privileged {TAG} id -u\n"
        f"docker rmi {TAG}\n"
    )
    assert "MB of its own layers" in output
    assert '"bomFormat": "CycloneDX"' in output
    assert "65532" in output.splitlines()
    assert host() == before


def test_the_exit_code_is_that_of_the_command() -> None:
    ended = subprocess.run(cluster_command("with-docker", "false"), env=ENVIRONMENT, check=False)
    assert ended.returncode == 1
