"""Restarts in the same pods beside new gangs, in one run, with real torch."""

import os
import statistics

import pytest

from e2e.manifests import queue
from e2e.restart_times import (
    FAILURES,
    SCOPES,
    measure,
    measure_kubelet,
    table,
)
from e2e.space import Space

RUNS = int(os.environ.get("TORCHRUN_RESTART_RUNS", "2"))


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_restart_in_the_same_pods_is_faster_than_a_new_gang(space: Space) -> None:
    resources = {"cpus": "250m", "memory": "1500Mi"}
    workspace = {"workspace": {"enabled": False}}
    torch = queue("torch", space.cluster.trainer, nodeResources=resources, storage=workspace)
    space.apply(torch)
    kubelet = measure_kubelet(space)
    assert len(kubelet) == 3
    samples = []
    for number in range(RUNS):
        for failure in FAILURES:
            for scope in SCOPES:
                name = f"{scope}-{failure}-{number}".lower()
                samples.append(measure(space, scope, failure, name))
                print(samples[-1], flush=True)
    print(table(samples, kubelet))
    for failure in FAILURES:
        in_place, gang = (
            statistics.median(
                s.seconds for s in samples if (s.scope, s.failure) == (scope, failure)
            )
            for scope in SCOPES
        )
        assert in_place < gang
