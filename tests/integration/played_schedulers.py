"""A simulated scheduler of gangs; end-to-end tests run the real ones."""

from collections.abc import Sequence
from typing import Any

from integration.controller_process import eventually
from integration.team import Team


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
