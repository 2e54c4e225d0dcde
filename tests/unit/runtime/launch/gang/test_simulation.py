"""The protocol on a network that loses, delays and repeats: never ranks of two rounds at once.

Leader and members are the real ones. Time, the network and the ranks are simulated. Connections
break at any moment and lose what is under way in both directions. Launchers are stopped and
continued.
"""

import pytest

from unit.runtime.launch.gang.simulation import Simulation

SEEDS = 250


@pytest.mark.parametrize("pauses", [0, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_of_two_rounds_never_run_at_once_and_every_gang_ends(size: int, pauses: int) -> None:
    rounds = successes = 0
    for seed in range(SEEDS):
        simulation = Simulation(seed, size, pauses=pauses)
        simulation.run()
        assert simulation.violations == [], f"seed {seed}"
        has_ended = simulation.have_all_ended or simulation.has_failed
        assert has_ended, f"seed {seed}: the gang does not end"
        assert simulation.rounds == sorted(set(simulation.rounds)), f"seed {seed}"
        rounds += len(simulation.rounds)
        successes += not simulation.has_failed
    assert rounds > 400, "no simulation has a second round"
    assert successes, "no gang succeeds"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_job_that_resumes_goes_on_beside_pods_that_end_late(size: int) -> None:
    rounds = 0
    for seed in range(SEEDS):
        simulation = Simulation(seed, size, pauses=3, is_suspended=True)
        simulation.run()
        assert simulation.violations == [], f"seed {seed}"
        assert simulation.is_over, f"seed {seed}: the gang neither goes on nor ends"
        rounds += simulation.rounds_after_resumption
    assert rounds > 100, "no gang goes on after a suspension"
