"""Two replicas of the manifests: a rolling update, progress through the Service, log levels."""

import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from e2e import controller
from e2e.cluster import ROOT
from e2e.history import History
from e2e.manifests import job
from e2e.space import CONTROLLER, Space
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS
from torchrun_controller.leader import LEASES

pytestmark = pytest.mark.long

PYTHON = "python3"
REPORTS = """
import os, time
os.environ["RANK"] = "0"
import torchrun_progress
for step in range(1, 4):
    torchrun_progress.report(step=step, total=3)
    time.sleep(1.2)
"""
REPORTERS = 6
LATEST = 2.0  # maximum seconds of a hand-over


@pytest.fixture
def replicas(space: Space) -> Iterator[list[str]]:
    """Scale to two replicas. Returns the names of the ready pods."""
    scale(space, 2)
    yield pods(space)
    scale(space, 1)


def scale(space: Space, count: int) -> None:
    space.cluster.kubectl("scale", *CONTROLLER, f"--replicas={count}")
    space.cluster.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")
    gone = [name for name in pods(space, ending=True) if name not in pods(space)]
    for name in gone:
        target = ("-n", controller.NAMESPACE, "wait", f"pod/{name}", "--for=delete")
        space.cluster.kubectl(*target, "--timeout=180s", check=False)


def pods(space: Space, *, ending: bool = False) -> list[str]:
    path, selector = PODS.path(controller.NAMESPACE), {"labelSelector": controller.SELECTOR}
    listed = space.api.get(path, params=selector).raise_for_status().json()["items"]
    return [
        pod["metadata"]["name"]
        for pod in listed
        if ending or "deletionTimestamp" not in pod["metadata"]
    ]


def refused_reports(space: Space, pod: str) -> float:
    """The number of progress reports that this replica has refused as a standby."""
    path = f"{PODS.path(controller.NAMESPACE)}/{pod}:8080/proxy/metrics"
    lines = space.api.get(path).raise_for_status().text.splitlines()
    wanted = 'torchrun_progress_reports_total{code="503"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))


def test_progress_reaches_the_leader_through_the_service(space: Space, replicas: list[str]):
    names = [f"run-{number}" for number in range(REPORTERS)]
    space.apply(*(job(name, "plain", [PYTHON, "-c", REPORTS]) for name in names))
    for name in names:
        space.wait_phase(name, "Succeeded")
    reports = [space.get(TORCHRUN_JOBS, name)["status"].get("progress", {}) for name in names]
    assert [progress.get("step") for progress in reports] == [3] * REPORTERS
    refused = [refused_reports(space, pod) for pod in replicas]
    print("refused by each replica:", refused)
    assert sum(refused) > 0, "otherwise no report reached the standby"


def test_a_rolling_update_hands_over_the_lease(space: Space, replicas: list[str]):
    with (
        History(space.api, LEASES, controller.NAMESPACE).running() as leases,
        space.histories(JOBS) as (children,),
    ):
        space.apply(job("during", "plain", [PYTHON, "-c", "import time; time.sleep(20)"], 2))
        leases.until(lambda lease: lease["spec"].get("holderIdentity") or None)
        space.cluster.kubectl("rollout", "restart", *CONTROLLER)
        late = [f"late-{number}" for number in range(5)]
        space.apply(*(job(name, "plain", ["true"]) for name in late))
        space.cluster.kubectl("rollout", "status", *CONTROLLER, "--timeout=180s")
        for name in ("during", *late):
            space.wait_phase(name, "Succeeded")
        gaps = handovers([lease["spec"] for lease in leases.states("torchrun-controller")])
    print("seconds without a leader:", [round(gap, 3) for gap in gaps])
    assert gaps
    assert max(gaps) < LATEST
    assert {name: len(uids) for name, uids in children.uids().items()} == dict.fromkeys(
        ("during", *late), 1
    )


def handovers(specs: list[JsonObject]) -> list[float]:
    """Seconds from each release of the lease until it was acquired."""
    gaps: list[float] = []
    released: datetime | None = None
    for spec in specs:
        if not spec.get("holderIdentity"):
            released = datetime.fromisoformat(spec["renewTime"])
        elif released is not None:
            gaps.append((datetime.fromisoformat(spec["acquireTime"]) - released).total_seconds())
            released = None
    return gaps


def test_the_documented_change_of_the_log_level(space: Space, replicas: list[str], tmp_path: Path):
    page = (ROOT / "docs" / "operations.md").read_text()
    blocks = (part.partition("```")[0] for part in page.split("```bash\n")[1:])
    (block,) = (block for block in blocks if "/loglevel" in block)
    run = subprocess.run(
        ["bash", "-eu", "-c", block],
        cwd=tmp_path,
        env=space.cluster.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(run.stdout, run.stderr)
    assert run.returncode == 0
    assert run.stdout.split() == ["debug"] * len(replicas)
    space.apply(job("watched", "plain", ["true"]))
    space.wait_phase("watched", "Succeeded")
    logs = "".join(
        space.cluster.kubectl("logs", "-n", controller.NAMESPACE, pod, "--since=2m").stdout
        for pod in replicas
    )
    assert '"level":"debug","message":"status changed"' in logs
