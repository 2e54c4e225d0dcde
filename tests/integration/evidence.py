"""Evidence of a failed test: logs of its controllers, objects of its team, writes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from integration.audit import AuditLog
from integration.team import Team
from torchrun_cluster import LocalCluster

LINES = 3000
QUIET = ("all ", "audit log", "log of the control plane")
"""Beginnings of titles that are kept and not shown."""
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
        yield from objects(team)
    if isinstance(audit, AuditLog):
        yield "audit log", tail(audit.path)
    if isinstance(folder, Path):
        for log in sorted(folder.rglob("*.log")):
            yield f"log {log.relative_to(folder)}", tail(log)


def objects(team: Team) -> Iterator[tuple[str, str]]:
    """The objects of the team's namespace; of jobs, only the status."""
    jobs: list[str] = []
    for path in (
        *(f"{team.group}/torchrunqueues", f"{team.group}/torchrunjobs", f"{team.batch}/jobs"),
        *(f"{team.core}/{plural}" for plural in ("pods", "persistentvolumeclaims", "events")),
    ):
        plural = path.rpartition("/")[2]
        try:
            items = team.api.items(path)
        except Exception as error:  # the API server may be what failed
            yield f"all {plural}", repr(error)
            continue
        yield f"all {plural}", json.dumps(items, indent=1)
        if path.startswith(team.group):
            jobs += [f"{i['metadata']['name']}: {json.dumps(i.get('status', {}))}" for i in items]
    yield "queues and jobs", "\n".join(jobs)


def tail(log: Path) -> str:
    """The last lines of a file."""
    if not log.exists():
        return f"there is no {log}"
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
