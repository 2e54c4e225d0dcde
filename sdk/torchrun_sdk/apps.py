"""A command on many nodes: `app("ddp", "torchrun train.py", gpus=8, replicas=4)`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torchrun_sdk.cluster.kubectl import Kubectl, print_note, run_attached
from torchrun_sdk.cluster.manifest import for_command, job_name
from torchrun_sdk.compute import Compute
from torchrun_sdk.errors import UsageError
from torchrun_sdk.source import functions, import_guard

# Set by `kt run`: an app is started as soon as it is defined.
RUN = "TORCHRUN_SDK_RUN"
_NODES = re.compile(r"--nnodes[= ](\S+)")


class App:
    """One command in every pod of a job, with the directory of the project as its workspace.

    replicas: number of nodes. ports: ports of the container, for port-forward and Services.
    """

    def __init__(
        self,
        name: str,
        cli_command: str,
        *,
        replicas: int = 1,
        ports: tuple[int, ...] | list[int] = (),
        directory: str | Path | None = None,
        compute: Compute | None = None,
        **resources: Any,
    ) -> None:
        if not cli_command.strip():
            raise UsageError(f"App {name} has no cli_command.")
        if compute is not None and resources:
            raise UsageError(
                f"App {name}: compute= and {', '.join(resources)} are mutually exclusive."
            )
        _check_nodes(name, cli_command, replicas)
        self.name = name
        self.cli_command = cli_command
        self.ports = tuple(ports)
        self.compute = (compute or Compute(**resources)).distribute("pytorch", replicas)
        self._directory = (
            Path(directory) if directory is not None else functions.project(Path.cwd())
        )

    def manifest(self, name: str) -> dict[str, Any]:
        """The TorchrunJob with this name."""
        return for_command(name, self.compute, self.cli_command, self.ports)

    def deploy(self) -> str:
        """Upload the directory and create the job; its name. Raises UsageError, ClusterError."""
        return self._deploy(Kubectl(self.compute.namespace))

    def _deploy(self, kubectl: Kubectl) -> str:
        import_guard.check_remote_call(f"start the app {self.name}")
        for volume in self.compute.volumes:
            kubectl.create_missing(volume.claim())
        name = job_name(self.name)
        words = ["submit", "--filename", "-", "--no-follow", "--directory", str(self._directory)]
        try:
            kubectl.run_plugin(*words, stdin=json.dumps(self.manifest(name)))
        except KeyboardInterrupt:
            # The user does not know its name yet.
            if kubectl.abandon_job(name, print_note):
                print_note(f"Deleted job {name}: its upload was interrupted.")
            raise
        return name

    def run(self) -> int:
        """Deploy and follow until the run ends; its exit code."""
        kubectl = Kubectl(self.compute.namespace)
        command = kubectl.plugin("logs", self._deploy(kubectl), "--follow")
        return run_attached(command)


def app(name: str, cli_command: str, **rest: Any) -> App:
    """An App. Under `kt run` it runs at once, and a failed run ends the program."""
    new = App(name, cli_command, **rest)
    if os.environ.get(RUN) and not import_guard.in_call():
        code = new.run()
        if code:
            raise SystemExit(code)
    return new


def _check_nodes(name: str, command: str, replicas: int) -> None:
    flag = _NODES.search(command)
    if flag is None or "$" in flag[1]:
        return
    low, _, high = flag[1].partition(":")
    if {low, high or low} != {str(replicas)}:
        raise UsageError(
            f"App {name}: cli_command has --nnodes={flag[1]}, but replicas is {replicas}. Remove"
            " --nnodes, which torchrun gets from the job, or use the same number."
        )
