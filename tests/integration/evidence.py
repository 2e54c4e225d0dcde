"""What the report of a failed test shows: logs of its controllers, jobs of its team, writes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from integration.audit import AuditLog
from integration.team import Team
from torchrun_cluster import LocalCluster

LINES = 300
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")


def gather(fixtures: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Titles and texts from the fixtures of the test, the most useful ones last."""
    cluster, team = fixtures.get("cluster"), fixtures.get("team")
    audit, folder = fixtures.get("audit"), fixtures.get("tmp_path")
    if isinstance(cluster, LocalCluster):
        for component in COMPONENTS:
            try:
                yield f"log of the control plane {component}", tail(cluster.log(component))
            except Exception as error:  # the test may have stopped it
                yield f"log of the control plane {component}", repr(error)
    if isinstance(team, Team):
        yield "queues and jobs", statuses(team)
    if isinstance(audit, AuditLog):
        yield "audit log", tail(audit.path)
    if isinstance(folder, Path):
        for log in sorted(folder.rglob("*.log")):
            yield f"log {log.relative_to(folder)}", tail(log)


def statuses(team: Team) -> str:
    """The statuses of the team's queues and jobs."""
    try:
        items = [
            item
            for plural in ("torchrunqueues", "torchrunjobs")
            for item in team.api.items(f"{team.group}/{plural}")
        ]
    except Exception as error:  # the API server may be what failed
        return repr(error)
    return "\n".join(f"{i['metadata']['name']}: {json.dumps(i.get('status', {}))}" for i in items)


def tail(log: Path) -> str:
    """The last lines of a file."""
    if not log.exists():
        return f"there is no {log}"
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
