"""Images by Docker and the demo on kind, with nothing left behind on the host.

They use the Docker engine that answers, if there is one, and start one otherwise.
"""

import os
import subprocess
import sys

import pytest

from kind.docker import ENVIRONMENT, cluster_command, host, with_docker
from torchrun_cluster import state
from torchrun_cluster.engine import docker_answers

INPUTS = ("pyproject.toml", "README.md", "LICENSE", "requirements", "api", "controller", "runtime")
TAG = "localhost/torchrun-test:docker"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(
        os.geteuid() != 0 and not docker_answers(), reason="no Docker engine, and not root"
    ),
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
    assert "MB without its base" in output
    assert '"bomFormat": "CycloneDX"' in output
    assert "65532" in output.splitlines()
    assert host() == before


def test_the_exit_code_is_that_of_the_command() -> None:
    ended = subprocess.run(cluster_command("with-docker", "false"), env=ENVIRONMENT, check=False)
    assert ended.returncode == 1


def test_the_demo_runs_on_kind() -> None:
    before = host()
    output = with_docker(
        "CLUSTER=kind make demo\n"
        "docker ps --all --format 'container {{.Names}}'\n"
        "docker volume ls --format 'volume {{.Name}}'\n",
        "--kind",
    )
    plan, _, run = output.partition("[1/7]")
    assert "  cluster    kind on Docker" in plan
    assert "  in all     about" in plan
    assert "rank 1" in run
    assert "Succeeded" in run
    assert "container torchrun-demo" not in run
    assert host() == before
    assert "demo" not in state.names()
