"""Simulated schedulers with their real CRDs, as the programs are not built here.

Their CRDs are not in this repository: TORCHRUN_TEST_CRDS names a folder with them (kubectl get crd
-o yaml, or their Helm charts); without it, the folder `shared/fixtures/crds` beside the checkout.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.controller_process import eventually
from integration.team import Team
from torchrun_cluster import LocalCluster

_BESIDE = Path(__file__).parents[3] / "shared" / "fixtures" / "crds"
CRDS = Path(os.environ.get("TORCHRUN_TEST_CRDS") or _BESIDE)
KAI_QUEUES = CRDS / "scheduling.run.ai_queues.yaml"
KAI_GROUPS = CRDS / "scheduling.run.ai_podgroups.yaml"
COSCHEDULING_GROUPS = CRDS / "scheduling.x-k8s.io_podgroups.yaml"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip the test with a reason if the CRD is not available."""
    return pytest.mark.skipif(not path.is_file(), reason=f"no {path.name} in TORCHRUN_TEST_CRDS")


def crd(cluster: LocalCluster, path: Path) -> None:
    """Install a scheduler's CRD, and wait until it is served."""
    cluster.kubectl("apply", "--server-side", "-f", str(path))
    group, _, plural = path.stem.partition("_")
    listed = ("get", f"{plural}.{group}", "--all-namespaces")
    eventually("it is served", lambda: cluster.kubectl(*listed, check=False).returncode == 0)


class Scheduler:
    """Binds whole gangs, one node for each worker, once the PodGroup and minMember pods exist and
    `nodes` has room for all of them. `group_of` returns the group of a pod, `path` is the path of
    the groups.
    """

    def __init__(
        self, team: Team, name: str, path: str, group_of: tuple[str, str], nodes: Sequence[str]
    ) -> None:
        self.team, self.name, self.nodes = team, name, nodes
        self.path = f"/apis/{path}".replace("NS", team.name)
        self._field, self._key = group_of

    def schedule(self) -> None:
        for group in self.team.api.items(self.path):
            name = group["metadata"]["name"]
            waiting = [
                pod
                for pod in self.team.api.items(f"{self.team.core}/pods")
                if pod["spec"]["schedulerName"] == self.name
                and pod["metadata"].get(self._field, {}).get(self._key) == name
                and not pod["spec"].get("nodeName")
            ]
            least = group["spec"]["minMember"]
            if len(waiting) < least:
                continue
            if least > len(self.nodes):
                self._refuse(name, least)
                continue
            for pod, node in zip(waiting, self.nodes, strict=False):
                self._bind(pod, node)

    def _refuse(self, group: str, least: int) -> None:
        condition = {
            "type": "UnschedulableOnNodePool",
            "status": "True",
            "nodePool": "default",
            "transitionID": "1",
            "reason": "PodGroup is not schedulable",
            "message": f"{least} pods need {least} nodes, there are {len(self.nodes)}",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
        body = {"status": {"schedulingConditions": [condition]}}
        self.team.api.patch(f"{self.path}/{group}/status", body)

    def _bind(self, pod: Any, node: str) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.team.api.create(f"{self.team.core}/pods/{name}/binding", body)

    def until(self, job: str, phase: str, reason: str | None = None) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            self.schedule()
            status = self.team.status(job)
            right = reason is None or status.get("reason") == reason
            return status if status.get("phase") == phase and right else None

        return eventually(f"{job} {phase} {reason or ''}", look)
