"""The NetworkPolicy of a job and the pods that it selects. Enforcement needs a network plugin."""

from typing import Any

from integration.controller_process import ControllerProcess, eventually
from integration.team import Team


def selected(team: Team, selector: dict[str, Any]) -> list[str]:
    """Names of the pods that a podSelector selects on the API server."""
    text = ",".join(f"{name}={value}" for name, value in selector["matchLabels"].items())
    return sorted(pod["metadata"]["name"] for pod in team.api.items(f"{team.core}/pods", text))


def test_only_the_job_can_reach_its_workers(team: Team, team_controller: ControllerProcess) -> None:
    queue = f"{team.group}/torchrunqueues/research"
    team.api.patch(queue, {"spec": {"networking": {"isolate": True}}})
    zipped = {"workspace": {"source": "zip", "delivery": "shared"}}
    team.submit("mine", volumes=zipped)
    team.submit("other", numNodes=1)
    team.has(f"{team.core}/pods/mine-sync-0")
    team.pod_becomes("mine-sync-0", "Succeeded")
    mine, other = team.workers("mine"), team.workers("other", 1)
    path = f"/apis/networking.k8s.io/v1/namespaces/{team.name}/networkpolicies"
    spec = team.has(f"{path}/mine")["spec"]
    assert selected(team, spec["podSelector"]) == sorted(mine)
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    assert peer.keys() == {"podSelector"}, "pods of the same namespace"
    assert selected(team, peer["podSelector"]) == sorted([*mine, "mine-sync-0"])
    assert selected(team, team.has(f"{path}/other")["spec"]["podSelector"]) == other
    team.api.delete(f"{team.group}/torchrunjobs/mine")
    eventually("it goes with its job", lambda: team.api.get(f"{path}/mine") is None)
