"""The namespace of a test, and common actions in it."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from bodies import Body
from e2e.cluster import Cluster
from e2e.history import History
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS, SERVICES, TORCHRUN_JOBS, Kind

RANDOM_SUFFIX = re.compile(r"(?<=-\d)-[a-z0-9]{5}$")
"""Of an Indexed Job's pods."""
PATIENCE = 300.0  # seconds, long enough for a busy machine
"""Seconds until what is waited for has failed to come: on a busy machine everything takes longer.

A wait that is over early costs nothing, so only tests of a time limit have limits of their own."""
CONTROLLER = ("-n", "torchrun-system", "deployment/torchrun-controller")


class Space:
    """One namespace of the cluster. `api` is an HTTP client of the API server."""

    def __init__(self, cluster: Cluster, api: httpx.Client, name: str) -> None:
        self.cluster = cluster
        self.api = api
        self.name = name

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, seconds: float = 200
    ) -> str:
        """Run kubectl in this namespace. Returns stdout and stderr."""
        ended = self.cluster.kubectl(
            "-n", self.name, *arguments, stdin=stdin, check=check, seconds=seconds
        )
        return ended.stdout + ended.stderr

    def apply(self, *objects: JsonObject) -> None:
        """Apply objects as a user would."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def get(self, kind: Kind[Any], name: str) -> Body:
        """The current object."""
        body: Body = self.api.get(kind.path(self.name, name)).raise_for_status().json()
        return body

    def status(self, job: str) -> Body:
        """The current status of a TorchrunJob."""
        status: Body = self.get(TORCHRUN_JOBS, job)["status"]
        return status

    def wait(self, target: str, condition: str, seconds: float = PATIENCE) -> None:
        """`kubectl wait`: target as pod/NAME, condition as jsonpath={.status.phase}=Running."""
        limit = f"--timeout={seconds:.0f}s"
        self.kubectl("wait", target, f"--for={condition}", limit, seconds=seconds + 20)

    def wait_phase(self, job: str, phase: str, seconds: float = PATIENCE) -> Body:
        """Wait until the TorchrunJob is in the phase. Returns its status."""
        self.wait(f"torchrunjob/{job}", f"jsonpath={{.status.phase}}={phase}", seconds)
        return self.status(job)

    def wait_reason(self, job: str, reason: str, seconds: float = PATIENCE) -> Body:
        """Wait until the TorchrunJob has the reason. Returns its status."""
        self.wait(f"torchrunjob/{job}", f"jsonpath={{.status.reason}}={reason}", seconds)
        return self.status(job)

    def wait_message(self, job: str, *texts: str, seconds: float = PATIENCE) -> None:
        """Wait until the message of the TorchrunJob has all of these texts.

        A reason may be set before its message is complete.
        """
        deadline = time.monotonic() + seconds
        while True:
            message = self.status(job).get("message", "")
            if all(text in message for text in texts):
                return
            assert time.monotonic() < deadline, f"{job}: no {texts} in {message!r}"
            time.sleep(0.2)

    def history(self, kind: Kind[Any]) -> AbstractContextManager[History]:
        """Record the history of all objects of a kind."""
        return History(self.api, kind, self.name).running()

    @contextmanager
    def histories(self, *kinds: Kind[Any]) -> Iterator[list[History]]:
        """Record several kinds."""
        if not kinds:
            yield []
            return
        with self.history(kinds[0]) as first, self.histories(*kinds[1:]) as rest:
            yield [first, *rest]

    def submit(
        self, directory: Path, command: str, *options: str, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """`kubectl torchrun submit --follow` in the directory."""
        started = time.monotonic()
        ended = subprocess.run(
            self.submit_command(command, *options),
            cwd=directory,
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        print(f"$ {command} ({time.monotonic() - started:.1f} s, exit code {ended.returncode})")
        print(ended.stdout, ended.stderr, sep="\n")
        return ended

    def submit_command(self, command: str, *options: str) -> list[str]:
        """The arguments of `kubectl torchrun submit --follow`."""
        return ["kubectl", "torchrun", "submit", "-n", self.name, "--follow", *options, command]

    def end_state(self) -> list[str]:
        """The objects of the namespace with their phases, without random parts of names."""
        lines = []
        for kind in (TORCHRUN_JOBS, *CHILDREN):
            for item in self.api.get(kind.path(self.name)).raise_for_status().json()["items"]:
                name = RANDOM_SUFFIX.sub("-*", item["metadata"]["name"])
                phase = item.get("status", {}).get("phase", "")
                lines.append(f"{kind.plural}/{name} {phase}".strip())
        return sorted(lines)


def until(ready: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Poll until the result is truthy, and return it. Fails with the name `what`."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


CHILDREN = (JOBS, PODS, CLAIMS, SERVICES)
