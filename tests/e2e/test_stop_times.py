"""Planned stops by each source, with real torch: what is lost, and that no checkpoint is handed out half."""

import os
import random

import pytest

from e2e.space import CONTROLLER, Space
from e2e.stop_times import (
    EVERY,
    JOB,
    Request,
    drain_of,
    measure,
    measure_deadline,
    measure_moment,
    preempt,
    prepare,
    resize,
    start_job,
    suspend,
    table,
)
from torchrun_cluster import LocalCluster

RUNS = int(os.environ.get("TORCHRUN_STOP_RUNS", "1"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.usefixtures("controller_on_the_first_node"),
]


@pytest.mark.nodes(2)
def test_planned_stops_lose_no_step(space: Space, local: LocalCluster) -> None:
    sources: dict[str, Request] = {
        "suspension": suspend,
        "preemption": preempt,
        "resize": resize,
        "drain": drain_of(local),
    }
    prepare(space)
    start_job(space, JOB, "stopping")
    samples = []
    for _ in range(RUNS):
        for source, request in sources.items():
            samples.append(measure(space, source, request))
            print(samples[-1], flush=True)
    assert space.status(JOB).get("restarts", 0) == 0
    space.kubectl("delete", "torchrunjob", JOB)
    start_job(space, "plain", "signal")
    alone = "suspension, SIGTERM only"
    samples += [measure(space, alone, suspend, "plain") for _ in range(RUNS)]
    space.kubectl("delete", "torchrunjob", "plain")
    samples += [measure_deadline(space, f"ends-{number}") for number in range(RUNS)]
    print(table(samples))
    planned = [sample.lost for sample in samples if sample.source != alone]
    assert sum(lost <= 1 for lost in planned) >= 0.95 * len(planned)


@pytest.mark.nodes(2)
def test_a_stop_at_any_moment_hands_out_no_half_checkpoint(
    space: Space, local: LocalCluster
) -> None:
    prepare(space)
    start_job(space, JOB, "stopping")
    moments = {
        "import and first steps": (8.0, lambda: None),
        "save": (12.0, lambda: None),
        "controller killed": (12.0, lambda: _kill_controller(space)),
    }
    samples = []
    for _ in range(RUNS):
        for moment, (latest, act) in moments.items():
            samples.append(measure_moment(space, moment, random.uniform(0, latest), act))
            print(samples[-1], flush=True)
    print(table(samples))
    # A rank that gets a checkpoint which is not complete ends with 3, which counts as a restart.
    assert space.status(JOB).get("restarts", 0) == 0
    assert max(sample.lost for sample in samples) <= EVERY + 1


def _kill_controller(space: Space) -> None:
    selector = ("-l", "app.kubernetes.io/name=torchrun-controller", "--force", "--grace-period=0")
    space.cluster.kubectl("-n", CONTROLLER[1], "delete", "pod", *selector)
