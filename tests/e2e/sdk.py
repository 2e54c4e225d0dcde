"""A user of the SDK: a directory with scripts, on a machine without GPUs."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from bodies import Body
from e2e.cluster import ROOT
from e2e.space import Space
from torchrun_cluster import images

SECONDS = 300
RAY_IMAGE = "localhost/torchrun-ray:e2e"
RAY = """ARG BASE
FROM ${BASE}
RUN python3 -m venv --system-site-packages /opt/ray && /opt/ray/bin/pip install --no-cache-dir 'ray[default]==2.60.0'
ENV PATH=/opt/ray/bin:$PATH
RUN printf '%s\\n' '#!/usr/bin/python3 -S' 'import sys, urllib.request' \\
    'print(urllib.request.urlopen(sys.argv[-1]).read().decode())' > /usr/local/bin/wget \\
    && chmod 755 /usr/local/bin/wget
"""
"""With what KubeRay's probes need of wget, which Ray's own images have."""
HEAD = "import os, sys, time\nimport torchrun_sdk as kt\n"


class Laptop:
    """A user's directory, on a machine without GPUs."""

    def __init__(self, space: Space, directory: Path, image: str) -> None:
        self.space = space
        self.directory = directory
        self.image = image

    def start(self, *command: str) -> "subprocess.Popen[str]":
        path = f"{Path(sys.executable).parent}:{self.space.cluster.environment['PATH']}"
        environment = {
            **self.space.cluster.environment,
            "PATH": path,
            "PYTHONPATH": str(ROOT / "sdk"),
            "TORCHRUN_SDK_CPU_ONLY": "1",
            "TORCHRUN_SDK_TIMES": "1",
            "TORCHRUN_SDK_IMAGE": self.image,
            "TORCHRUN_NAMESPACE": self.space.name,
        }
        return subprocess.Popen(
            command,
            cwd=self.directory, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def script(
        self, text: str, name: str = "script.py", arguments: tuple[str, ...] = ()
    ) -> "subprocess.Popen[str]":
        (self.directory / name).write_text(HEAD + textwrap.dedent(text))
        return self.start("python3", name, *arguments)

    def run(self, text: str) -> str:
        """Run a script to its end. Returns its output."""
        return output_of(self.script(text))

    def deliver(self, way: str) -> None:
        """Set the delivery of the workspace in the queue: shared or direct."""
        self.edit_queue(storage={"workspace": {"delivery": way}})

    def edit_queue(self, **spec: object) -> None:
        patch = json.dumps({"spec": spec})
        self.space.kubectl("patch", "torchrunqueue", "cpu", "--type=merge", "--patch", patch)

    def jobs(self) -> list[Body]:
        listed: list[Body] = json.loads(self.space.kubectl("get", "torchrunjobs", "-o", "json"))[
            "items"
        ]
        return listed

    def pods(self) -> list[str]:
        query = ("get", "pods", "-l", "app.kubernetes.io/component=worker", "-o", "name")
        return self.space.kubectl(*query).split()


def output_of(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=SECONDS)
    print(out, err, sep="\n")
    assert process.returncode == 0, err
    return out


@pytest.fixture
def laptop(space: Space, tmp_path: Path) -> "Laptop":
    directory = tmp_path / "project"
    directory.mkdir()
    new = Laptop(space, directory, space.cluster.trainer)
    queue = yaml.safe_load((ROOT / "examples" / "gpt" / "queue.yaml").read_text())
    queue["spec"]["image"] = space.cluster.trainer
    queue["spec"]["nodeResources"]["cpus"] = "100m"  # a node of two cores has room for five workers
    space.kubectl("delete", "torchrunqueue", "plain")
    space.apply(queue)
    return new


@pytest.fixture
def ray_image(laptop: "Laptop", tmp_path: Path) -> str:
    local = laptop.space.cluster.local
    if local is None:
        pytest.skip("needs an image of its own, which only the local cluster can be given")
    context = tmp_path / "image"
    context.mkdir()
    (context / "Dockerfile").write_text(RAY)
    base = {"BASE": "localhost/torchrun-base"}
    local.load_image(images.build(context / "Dockerfile", context, RAY_IMAGE, base))
    return RAY_IMAGE
