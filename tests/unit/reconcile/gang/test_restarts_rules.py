"""Which failures restart the gang, by the rules of job and queue."""

import pytest

from unit.reconcile.failing import disrupt, fail, running
from world import World, make_job, make_queue


@pytest.mark.parametrize(
    ("rules", "ended", "phase", "restarts", "disruptions"),
    [
        ([{"exitCodes": [3], "action": "fail"}], {"exit_code": 3}, "Failed", 0, 0),
        ([{"exitCodes": [3], "action": "fail"}], {"exit_code": 4}, "Queued", 1, 0),
        ([{"exitCodes": [3], "action": "ignore"}], {"exit_code": 3}, "Queued", 0, 1),
        ([{"signals": [9], "action": "fail"}], {"exit_code": 137}, "Failed", 0, 0),
        (
            [{"exitCodes": [3], "action": "ignore"}, {"exitCodes": [3, 4], "action": "fail"}],
            {"exit_code": 3},
            "Queued",
            0,
            1,
        ),
    ],
)
def test_the_first_rule_that_matches_decides(rules, ended, phase, restarts, disruptions):
    world = running(rules=rules)
    fail(world, **ended)
    world.settle()
    status = world.job.status
    assert (world.phase, status.restarts, status.disruptions) == (phase, restarts, disruptions)


def test_a_rule_can_match_pod_conditions():
    world = running(rules=[{"podConditions": ["DisruptionTarget"], "action": "fail"}])
    disrupt(world)
    world.settle()
    assert world.phase == "Failed"


def test_never_means_never():
    world = running(restartPolicy="Never")
    disrupt(world)
    world.settle()
    assert world.phase == "Failed"
    assert "restartPolicy is Never" in world.job.status.message


def test_jobs_inherit_the_reliability_of_the_queue():
    queue = make_queue(reliability={"maxRestarts": 0})
    world = World(make_job(numNodes=1), queue)
    world.settle()
    fail(world)
    world.settle()
    assert world.phase == "Failed"
