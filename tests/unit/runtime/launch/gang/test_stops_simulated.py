"""All ranks of a gang stop at the same call, or none does, on a network that loses and repeats.

Leader, ballots and the calls of ranks are the real ones. Connections break and lose what is under
way, messages are late and come twice, launchers and ranks are frozen at any moment.
"""

from collections.abc import Callable

import pytest

from torchrun_runtime.launch.gang import ballot, stopping
from torchrun_runtime.launch.rank import _torchrun_stopping as calls
from unit.runtime.launch.gang.simulated_stops import StopSimulation

SEEDS = 60
# Seconds of a step and of the grace period.
LOOPS = {"20 ms": (0.02, 25.0), "1 s": (1.0, 25.0), "60 s": (60.0, 600.0), "4 ms": (0.004, 25.0)}


def simulate(
    seed: int, loop: str, *, kind: str = stopping.STOP, faults: bool = True
) -> StopSimulation:
    step, grace = LOOPS[loop]
    simulation = StopSimulation(
        seed,
        size=2 + seed % 2,
        ranks=1 + seed // 2 % 2,
        step=step,
        grace=grace,
        kind=kind,
        is_coupled=seed % 3 > 0,
        faults=faults,
    )
    simulation.run()
    return simulation


@pytest.mark.parametrize("kind", [stopping.STOP, stopping.SAVE])
@pytest.mark.parametrize("loop", ["20 ms", "1 s", "60 s"])
def test_all_ranks_stop_at_one_call_or_none(loop: str, kind: str) -> None:
    agreed = 0
    for seed in range(SEEDS):
        simulation = simulate(seed, loop, kind=kind)
        assert simulation.violations == [], f"seed {seed}"
        agreed += simulation.committed_at is not None
    assert agreed > SEEDS / 3


@pytest.mark.parametrize(("loop", "seconds"), [("20 ms", 1.5), ("1 s", 4.0), ("60 s", 150.0)])
def test_without_faults_a_gang_agrees_at_once_and_stops_within_two_steps(
    loop: str, seconds: float
) -> None:
    for seed in range(SEEDS):
        simulation = simulate(3 * seed + 1, loop, faults=False)
        if not simulation.began:
            continue
        assert [rank.told for rank in simulation.ranks].count(None) == 0, f"seed {seed}"
        assert simulation.committed_at is not None
        assert simulation.committed_at - simulation.wanted_at < 0.5, f"seed {seed}"
        assert simulation.now - simulation.wanted_at < seconds, f"seed {seed}"


def never(*_: object) -> bool:
    return False


def without_wait(rank: calls.Calls) -> int:
    if rank._control[calls.WORD] & 0xF == calls.PROPOSED:
        rank.leave()
        return calls.GO_ON
    return LOOK(rank)


def one_is_enough(
    agreements: stopping.Agreements, agreement: stopping.Agreement, verdict: str
) -> bool:
    return verdict in [vote.verdict for vote in agreements._answers(agreement).values()]


LOOK = calls.Calls.look
PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the leader commits before all have accepted": lambda patch: patch.setattr(
        stopping.Agreements, "_all", one_is_enough
    ),
    "a rank does not wait at the call": lambda patch: patch.setattr(
        calls.Calls, "look", without_wait
    ),
    "a rank waits too short": lambda patch: patch.setattr(calls, "WAIT_SECONDS", 0.1),
    "a node accepts a call that its ranks have passed": lambda patch: patch.setattr(
        ballot.Slot, "has_passed", never
    ),
    "a node accepts while a rank is undecided": lambda patch: patch.setattr(ballot, "ENTERED", -1),
    "a node looks before the stores of its ranks arrive": lambda patch: patch.setattr(
        ballot, "FENCE_SECONDS", 0.0
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_the_simulation_finds_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_FIRST_MARGIN", 0.002)  # most proposals arrive as calls do
    PLANTED[name](monkeypatch)
    for seed in range(20 * SEEDS):
        if simulate(seed, "4 ms", faults=seed % 4 == 3).violations:
            return
    raise AssertionError("no history reveals it")
