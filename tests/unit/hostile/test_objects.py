"""Hostile TorchrunJobs and TorchrunQueues affect themselves only: 300 here, 10,000 in `make hostile`.

Prints the seed; `HOSTILE_SEED` sets it, `HOSTILE_OBJECTS` the number.
"""

import json
import os
import random
import resource

import pytest

from hostile import objects
from hostile.shrinking import shrunk
from hostile.world import problems
from torchrun_api.json import JsonObject

SEED = int(os.environ.get("HOSTILE_SEED", "0"))
OBJECTS = int(os.environ.get("HOSTILE_OBJECTS", "300"))
AT_A_TIME = 100
GROWTH = 300 * 2**20  # bytes; the simulated server remembers every state of every object


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.timeout(7200)
def test_a_hostile_object_affects_itself_only() -> None:
    print(f"HOSTILE_SEED={SEED}, {OBJECTS} objects")
    before = 0
    for number in range(0, OBJECTS, AT_A_TIME):
        chance = random.Random(f"{SEED} {number}")
        bodies = [objects.body(chance, number + i) for i in range(AT_A_TIME)]
        if found := problems(bodies):
            few = shrunk(bodies, lambda some: bool(problems(some)))
            details = [*problems(few), *(json.dumps(body)[:3000] for body in few)]
            pytest.fail("\n".join([*found[:5], "shrunk:", *details[:10]]))
        before = before or peak()
    grown = peak() - before
    print(f"grown by {grown / 2**20:.0f} MiB to {peak() / 2**20:.0f} MiB")
    assert grown < GROWTH


def test_large_objects_affect_themselves_only() -> None:
    chance = random.Random(SEED)
    assert problems([objects.large(chance, number) for number in range(20)]) == []


def test_a_charge_that_another_manager_owns_can_be_released() -> None:
    """An apply does not remove it from the status."""
    body: JsonObject = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": "restored"},
        "spec": {},
        "status": {"admission": {"nodes": 2, "queue": "gone"}},
    }
    assert problems([body]) == []
