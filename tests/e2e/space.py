"""A namespace of one test, and what tests do in it."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from e2e.cluster import Cluster
from e2e.history import History
from torchrun_api.json import JsonObject
from torchrun_api.kinds import CLAIMS, JOBS, PODS, SERVICES, TORCHRUN_JOBS, Kind

RANDOM_SUFFIX = re.compile(r"(?<=-\d)-[a-z0-9]{5}$")
"""Of an Indexed Job's pods."""
CONTROLLER = ("-n", "torchrun-system", "deployment/torchrun-controller")


class Space:
    """One namespace of the cluster. `api` is an HTTP client to the API server."""

    def __init__(self, cluster: Cluster, api: httpx.Client, name: str) -> None:
        self.cluster = cluster
        self.api = api
        self.name = name

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, seconds: float = 120
    ) -> str:
        """kubectl in this namespace; its output, with that on stderr after it."""
        ended = self.cluster.kubectl(
            "-n", self.name, *arguments, stdin=stdin, check=check, seconds=seconds
        )
        return ended.stdout + ended.stderr

    def apply(self, *objects: JsonObject) -> None:
        """Apply objects as a user does."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def get(self, kind: Kind, name: str) -> JsonObject:
        """An object as it is now."""
        return self.api.get(kind.path(self.name, name)).raise_for_status().json()

    def wait(self, target: str, condition: str, seconds: float = 60) -> None:
        """`kubectl wait`: target as pod/NAME, condition as jsonpath={.status.phase}=Running."""
        limit = f"--timeout={seconds:.0f}s"
        self.kubectl("wait", target, f"--for={condition}", limit, seconds=seconds + 20)

    def wait_phase(self, job: str, phase: str, seconds: float = 60) -> JsonObject:
        """Wait until the TorchrunJob is in the phase; its status."""
        self.wait(f"torchrunjob/{job}", f"jsonpath={{.status.phase}}={phase}", seconds)
        return self.get(TORCHRUN_JOBS, job)["status"]

    def wait_reason(self, job: str, reason: str, seconds: float = 60) -> JsonObject:
        """Wait until the TorchrunJob's Reason column says so; its status."""
        self.wait(f"torchrunjob/{job}", f"jsonpath={{.status.reason}}={reason}", seconds)
        return self.get(TORCHRUN_JOBS, job)["status"]

    def history(self, kind: Kind) -> AbstractContextManager[History]:
        """Record what the objects of a kind go through."""
        return History(self.api, kind, self.name).running()

    @contextmanager
    def histories(self, *kinds: Kind) -> Iterator[list[History]]:
        """The same for several kinds."""
        if not kinds:
            yield []
            return
        with self.history(kinds[0]) as first, self.histories(*kinds[1:]) as rest:
            yield [first, *rest]

    def submit(
        self, directory: Path, command: str, *options: str, seconds: float = 180
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
        """The words of `kubectl torchrun submit --follow`."""
        return ["kubectl", "torchrun", "submit", "-n", self.name, "--follow", *options, command]

    def end_state(self) -> list[str]:
        """The namespace's objects with their phases, without what differs from run to run."""
        found = []
        for kind in (TORCHRUN_JOBS, *CHILDREN):
            for item in self.api.get(kind.path(self.name)).raise_for_status().json()["items"]:
                name = RANDOM_SUFFIX.sub("-*", item["metadata"]["name"])
                phase = item.get("status", {}).get("phase", "")
                found.append(f"{kind.plural}/{name} {phase}".strip())
        return sorted(found)

    def story(self) -> str:
        """Everything that helps to see why a test failed."""
        parts = [
            ("torchrunjobs", ("describe", "torchrunjobs")),
            ("objects", ("get", "jobs,pods,pvc,services", "-o", "wide")),
            ("pods", ("describe", "pods")),
            ("controller", ("logs", *CONTROLLER, "--tail=150")),
        ]
        texts = []
        for title, arguments in parts:
            # No namespace of ours before the controller's: kubectl takes the last one given.
            texts.append(f"--- {title}\n{self.kubectl(*arguments, check=False)}")
        return "\n".join(texts)


CHILDREN = (JOBS, PODS, CLAIMS, SERVICES)
