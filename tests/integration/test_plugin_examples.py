"""Every example of the plugin's help that needs no pods, unchanged, on a real API server.

The tests set phases, as no controller runs. Examples that need pods run in tests/e2e.
"""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from integration.test_plugin import READY, Laptop, Running, laptop
from kubectl_torchrun.__main__ import cli
from torchrun_api.json import JsonObject

__all__ = ["laptop"]

JOB = "my-project-x7k2p"
NEED_PODS = frozenset(
    {"checkpoint", "logs", "debug", "exec", "port-forward", "selftest", "stacks", "state-files"}
)
COMPLETE = {**READY[0], "type": "Complete"}
ELASTIC = {"numNodes": 2, "elastic": {"minNodes": 1, "maxNodes": 8}}


def examples() -> list[str]:
    """The command lines in the help of all commands and of the group."""
    words: list[list[str]] = [[], *([name] for name in sorted(cli.commands))]
    shown = (CliRunner().invoke(cli, [*command, "--help"]).stdout for command in words)
    lines = (line.strip() for text in shown for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line.startswith("kubectl torchrun ")))


EXAMPLES = examples()
# tests/local runs jobs on this machine, and tests/unit/plugin follows tables until Ctrl-C.
ELSEWHERE = ("--local", "list --watch", "queues --watch")
HERE = [
    line
    for line in EXAMPLES
    if line.split()[2] not in NEED_PODS and not any(words in line for words in ELSEWHERE)
]


def start(laptop: Laptop, line: str, directory: Path) -> Running:
    """Start the line in a shell, with the plugin and the namespace of the test."""
    program = directory / "kubectl-torchrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kubectl_torchrun "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    config = json.loads(Path(laptop.kubeconfig).read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = laptop.namespace
    (directory / "config").write_text(json.dumps(config))
    environment = {
        **os.environ,
        "KUBECONFIG": str(directory / "config"),
        "PATH": f"{directory}:{os.environ['PATH']}",
    }
    return Running(
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=laptop.project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


WRITTEN = """
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunJob
spec: {jobQueue: dev, numNodes: 1, command: python train.py}
"""

QUEUE = """
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunQueue
metadata: {name: dev}
spec: {image: "pytorch:1"}
"""


def a_job(laptop: Laptop, name: str, **status: object) -> None:
    body: JsonObject = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": name, "namespace": laptop.namespace},
        "spec": {
            "jobQueue": "dev",
            "command": "x",
            "volumes": {"workspace": {"source": "zip"}},
            **ELASTIC,
        },
    }
    laptop.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    laptop.set_status(name, **status)


def submitted(laptop: Laptop, running: Running, line: str) -> None:
    """Play the controller of a new job whose workspace is ready at once."""
    name = running.says(r"Created torchrunjob\.torchrun\.ai/(\S+)")[1]
    if "--dev" in line:
        running.says(f"kubectl torchrun sync {name} --watch")
    if "--wait=Running" in line:
        laptop.set_status(name, phase="Running", conditions=READY)
    else:
        laptop.set_status(name, phase="Succeeded", conditions=[*READY, COMPLETE])


def suspended(laptop: Laptop, running: Running, line: str) -> None:
    running.says("Suspending job")
    laptop.set_status(JOB, phase="Suspended")


def resumed(laptop: Laptop, running: Running, line: str) -> None:
    running.says("Resuming job")
    laptop.set_status(JOB, phase="Running")


def arrived(laptop: Laptop, running: Running, line: str) -> None:
    """Check the upload of a waiting job, and of a running job that is watched."""
    if "--watch" in line:
        running.says("Watching")
        laptop.set_status(line.split()[3], phase="Succeeded", conditions=[*READY, COMPLETE])
    else:
        running.says(r"^1 file in ")
        laptop.set_status(JOB, phase="Succeeded", conditions=[*READY, COMPLETE])


PLAYS: dict[str, Callable[[Laptop, Running, str], None]] = {
    "submit": submitted,
    "run": submitted,
    "suspend": suspended,
    "resume": resumed,
    "sync": arrived,
}
CODES = {"doctor": 1}  # no controller runs, which doctor reports as an error


@pytest.mark.parametrize("line", HERE)
def test_an_example_works_unchanged(laptop: Laptop, line: str, tmp_path: Path) -> None:
    command = line.split()[2]
    laptop.queues("dev")
    waits = command == "sync" and "--watch" not in line
    conditions = [] if waits else READY
    for name in {JOB, "other-run", "try"}.intersection(line.split()):
        if f"--name {name}" in line:
            continue
        a_job(laptop, name, phase="Syncing" if waits else "Running", conditions=conditions)
    tools = tmp_path / "tools"
    tools.mkdir()
    if "-f job.yaml" in line:
        (laptop.project / "job.yaml").write_text(WRITTEN)
    if command == "render":
        (laptop.project / "queue.yaml").write_text(QUEUE)
        laptop.cluster.kubectl("apply", "-n", laptop.namespace, "-f", "-", stdin=QUEUE)
    running = start(laptop, line, tools)
    if command in PLAYS and "--dry-run" not in line:
        PLAYS[command](laptop, running, line)
    code, out, err = running.end()
    assert code == CODES.get(command, 0), out + err
    there = laptop.cluster.kubectl("get", "tj", "-n", laptop.namespace, "-o", "name").stdout
    assert (f"/{JOB}\n" in there) == (JOB in line and command != "cancel")
    if "> job.yaml" in line:
        laptop.cluster.kubectl("apply", "-f", str(laptop.project / "job.yaml"))
    if "-o name" in line and command == "submit":
        assert re.fullmatch(r"torchrunjob\.torchrun\.ai/my-project-\w{5}\n", out)


def test_all_other_examples_need_pods() -> None:
    others = [
        line
        for line in EXAMPLES
        if line not in HERE and not any(words in line for words in ELSEWHERE)
    ]
    assert {line.split()[2] for line in others} == NEED_PODS
    assert len(HERE) > 20
