"""Which checkpoints are complete, and which one a round resumes from."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang import leader
from torchrun_runtime.launch.gang.checkpoints import (
    LONGEST_PATH,
    CheckpointLedger,
    CompleteCheckpoint,
    Saved,
    choose,
    digest,
    limited,
)
from torchrun_runtime.launch.gang.existence import PathCheck
from torchrun_runtime.launch.gang.leader import GangLeader, Predecessor
from torchrun_runtime.launch.gang.messages import (
    FAILED,
    LEAVING,
    LONGEST_LINE,
    READY,
    RUNNING,
    GangOrder,
    InvalidMessageError,
    MemberState,
    OpenGate,
    StartRound,
    StopRound,
    decode_order,
    decode_state,
    encode,
    encode_order,
    encode_state,
)
from torchrun_runtime.launch.gang.policy import RestartLimits, RestartPolicy
from unit.runtime.launch.gang.simulation import Simulation

CAUSE = Cause(1, 0, None, "Exception", "ValueError: no", "2026-01-01T00:00:00.000000Z")


def time(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}.000000Z"


def known(step: int) -> CompleteCheckpoint:
    return CompleteCheckpoint(step, f"/ckpt/{step}", time(step))


def by_rank_0(step: int, world: int = 2, complete: bool = False, path: str = "") -> Saved:
    return Saved(step, world, (0,), path or f"/ckpt/{step}", time(step), complete)


def by_rank_1(step: int) -> Saved:
    return Saved(step, 2, (1,))


def order_of(gang: GangLeader) -> "GangOrder | None":
    """The present order; mypy takes an attribute for constant."""
    return gang.order


def steps(ledger: CheckpointLedger) -> list[int]:
    return [checkpoint.step for checkpoint in ledger.newest]


def test_a_checkpoint_is_complete_once_every_rank_has_saved_it() -> None:
    ledger = CheckpointLedger()
    ledger.note([(by_rank_0(1), by_rank_0(2)), (by_rank_1(1),)])
    assert steps(ledger) == [1]
    ledger.note([(by_rank_0(1), by_rank_0(2)), (by_rank_1(1), by_rank_1(2))])
    assert ledger.newest == (known(2), known(1))


def test_the_path_is_that_of_rank_0_on_whatever_node() -> None:
    ledger = CheckpointLedger()
    ledger.note([(by_rank_1(1),), (by_rank_0(1),)])
    assert ledger.newest == (known(1),)
    ledger = CheckpointLedger()
    ledger.note([(by_rank_1(1),), ()])
    assert ledger.newest == ()


def test_rank_0_alone_may_say_that_all_is_saved_also_to_another_path() -> None:
    ledger = CheckpointLedger()
    ledger.note([(by_rank_0(1, complete=True),)])
    assert ledger.newest == (known(1),)
    ledger.note([(by_rank_0(1, complete=True, path="s3://bucket/1"),)])
    assert [each.path for each in ledger.newest] == ["s3://bucket/1", "/ckpt/1"]


def test_other_ranks_than_those_of_the_world_count_for_nothing() -> None:
    ledger = CheckpointLedger()
    ledger.note([(by_rank_0(1, world=3), Saved(1, 3, (5, -1)), Saved(1, 2, (1, 2)))])
    ledger.note([(by_rank_0(1, world=0),)])
    assert ledger.newest == ()


def test_a_step_that_becomes_complete_late_is_not_the_newest() -> None:
    ledger = CheckpointLedger()
    ledger.note([(by_rank_0(1), by_rank_0(2, complete=True)), ()])
    ledger.note([(by_rank_0(1), by_rank_0(2, complete=True)), (by_rank_1(1),)])
    assert steps(ledger) == [2, 1]


def test_an_overwritten_path_has_only_its_newest_checkpoint() -> None:
    ledger = CheckpointLedger()
    for step in range(1, 3):
        ledger.note([(by_rank_0(step, world=1, path="/ckpt/last"),)])
    assert [(each.step, each.path) for each in ledger.newest] == [(2, "/ckpt/last")]


def test_the_newest_three_stay_and_a_clock_that_goes_back_does_not_change_their_order() -> None:
    ledger = CheckpointLedger()
    ledger.inherit([known(50), known(40)])
    for step in range(1, 4):
        ledger.note([(by_rank_0(step, world=1),)])
    assert steps(ledger) == [3, 2, 1], "also after a resumption from an older step"
    times = [each.time for each in ledger.newest]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    assert min(times) > time(50)


def test_the_choice_is_the_newest_that_every_node_has() -> None:
    candidates = (known(3), known(2), known(1))
    assert choose(candidates, {0: (), 1: ()}) == (known(3), ())
    checkpoint, skipped = choose(candidates, {0: (1,), 1: (0,)})
    assert checkpoint == known(1)
    assert [(each.node, each.checkpoint.step) for each in skipped] == [(1, 3), (0, 2)]
    assert choose(candidates, {0: (0, 1, 2)})[0] is None
    assert choose((), {0: ()}) == (None, ())


def failed_gang(*saves: "tuple[Saved, ...]") -> GangLeader:
    """A gang of two nodes whose round 0 has failed on node 1, after these saves."""
    gang = GangLeader(2, RestartPolicy(RestartLimits(3)))
    for node in range(2):
        gang.receive(node, MemberState(), 0)
    gang.open_gate(0)
    for node in range(2):
        gang.receive(node, MemberState(RUNNING, 0), 0)
    for node, saved in enumerate(saves):
        gang.receive(node, MemberState(RUNNING, 0, saved=saved), 1)
    gang.receive(1, MemberState(FAILED, 0, CAUSE, saved=saves[1] if saves else ()), 2)
    return gang


def test_the_next_round_waits_until_every_node_has_looked_for_the_candidates() -> None:
    saves = (by_rank_0(1),), (by_rank_1(1),)
    gang = failed_gang(*saves)
    assert order_of(gang) == StopRound(0, checkpoints=(known(1),))
    name = digest((known(1),))
    gang.receive(0, MemberState(READY, 0, saved=saves[0], checked=name), 3)
    assert isinstance(order_of(gang), StopRound)
    gang.receive(1, MemberState(FAILED, 0, CAUSE, saved=saves[1], checked=name), 4)
    assert order_of(gang) == StartRound(1, restarts=1, checkpoint=known(1))
    assert gang.restarts().last[0].seconds == 2, "the wait is no part of the round"


def test_a_save_during_the_stop_is_a_candidate_that_is_looked_for_again() -> None:
    saves = (by_rank_0(1), by_rank_0(2)), (by_rank_1(1),)
    gang = failed_gang(*saves)
    old = digest((known(1),))
    gang.receive(0, MemberState(READY, 0, saved=saves[0], checked=old), 3)
    late = (by_rank_1(1), by_rank_1(2))
    gang.receive(1, MemberState(FAILED, 0, CAUSE, saved=late, checked=old), 3)
    assert order_of(gang) == StopRound(0, checkpoints=(known(2), known(1)))
    new = digest((known(2), known(1)))
    gang.receive(0, MemberState(READY, 0, saved=saves[0], checked=new, missing=(0,)), 4)
    gang.receive(1, MemberState(FAILED, 0, CAUSE, saved=late, checked=new), 4)
    assert order_of(gang) == StartRound(1, restarts=1, checkpoint=known(1))
    assert [each.node for each in gang.checkpoints().skipped] == [0]


def test_without_checkpoints_no_round_waits() -> None:
    gang = failed_gang()
    gang.receive(0, MemberState(READY, 0), 3)
    assert order_of(gang) == StartRound(1, restarts=1)


def test_the_first_round_resumes_from_what_earlier_gangs_left() -> None:
    gang = GangLeader(1, RestartPolicy(RestartLimits()))
    gang.receive(0, MemberState(), 0)
    gang.open_gate(0, Predecessor(checkpoints=(known(2), known(1))))
    assert order_of(gang) == OpenGate(checkpoints=(known(2), known(1)))
    name = digest((known(2), known(1)))
    gang.receive(0, MemberState(checked=name, missing=(0,)), 0)
    assert order_of(gang) == StartRound(0, checkpoint=known(1))


def test_the_leader_awaits_the_others_while_their_ranks_save() -> None:
    gang = failed_gang((by_rank_0(1),), ())
    assert not gang.checkpoints().is_awaited, "node 1 has failed and saves no more"
    gang.receive(1, MemberState(LEAVING, 0), 3)
    assert gang.checkpoints().is_awaited
    gang.lose(1, 4)
    assert not gang.checkpoints().is_awaited
    gang.receive(1, MemberState(LEAVING, 0, saved=(by_rank_1(1),)), 5)
    assert not gang.checkpoints().is_awaited
    assert gang.checkpoints().newest == (known(1),)


def test_messages_arrive_as_they_were_sent_and_fit_in_a_line() -> None:
    longest = "/" + "\U0001f600" * (LONGEST_PATH - 1)
    saves = limited([Saved(n, 999, tuple(range(64)), longest, time(n), True) for n in range(20)])
    cause = CAUSE._replace(message="\x01" * 2000)
    state = MemberState(FAILED, 1, cause, saved=saves, checked="x", missing=(0, 2))
    assert decode_state(encode_state(state)) == state
    assert len(encode_state(state)) < LONGEST_LINE
    candidates = tuple(CompleteCheckpoint(n, longest, time(n)) for n in range(3))
    for order in (
        OpenGate(checkpoints=candidates),
        StopRound(1, checkpoints=candidates),
        StartRound(2, checkpoint=candidates[0]),
    ):
        assert decode_order(encode_order(order)) == order
        assert len(encode_order(order)) < LONGEST_LINE


@pytest.mark.parametrize(
    "saved",
    ["x", [1], [["1", 1, [0], "", "", False]], [[1, 1, 0, "", "", False]], [[1, 1, [0], 1, "", 0]]],
)
def test_saves_of_other_types_are_refused(saved: object) -> None:
    with pytest.raises(InvalidMessageError):
        decode_state(encode({"state": READY, "round": 0, "saved": saved}))


@pytest.mark.parametrize("path", ["", "x" * (LONGEST_PATH + 1), 1])
def test_a_checkpoint_without_a_path_is_refused(path: object) -> None:
    body = {"step": 1, "path": path, "time": ""}
    with pytest.raises(InvalidMessageError):
        decode_order(encode({"order": "open", "checkpoints": [body]}))


def look(check: PathCheck, candidates: "tuple[CompleteCheckpoint, ...]") -> "tuple[int, ...]":
    while (missing := check.look(candidates)) is None:
        pass
    return missing


def test_a_path_is_missing_only_if_the_storage_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").touch()
    paths = ("there", "gone", "there/below")
    candidates = tuple(
        CompleteCheckpoint(n, str(tmp_path / path), "") for n, path in enumerate(paths)
    )
    candidates += (
        CompleteCheckpoint(3, "s3://bucket/3", ""),
        CompleteCheckpoint(4, "/" + "x" * 300, ""),
    )
    assert look(PathCheck(), candidates) == (1, 2)
    log = capfd.readouterr().err
    assert f"the checkpoint of step 1 does not exist on this node: {tmp_path}/gone" in log
    assert "cannot tell whether a checkpoint exists" in log


@pytest.fixture
def dead_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    revived = threading.Event()
    monkeypatch.setattr(
        "torchrun_runtime.launch.gang.existence.os.stat", lambda path: revived.wait(60)
    )
    yield
    revived.set()


def test_dead_storage_delays_the_start_but_does_not_block_it(
    dead_storage: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert look(PathCheck(0.05), (known(1),)) == (), "the ranks meet the storage themselves"
    assert "the storage does not tell within 0 s" in capfd.readouterr().err


def first_candidate(
    candidates: "tuple[CompleteCheckpoint, ...]", _: object
) -> "tuple[CompleteCheckpoint | None, tuple[()]]":
    return (candidates[0] if candidates else None), ()


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        ("torchrun_runtime.launch.gang.checkpoints", "_is_of_all", lambda save, nodes: True),
        ("torchrun_runtime.launch.gang.checkpoints", "_after", lambda time: ""),
        (leader.__name__, "choose", first_candidate),
        (f"{leader.__name__}.GangLeader", "_have_all_checked", lambda self: True),
        (
            "torchrun_runtime.launch.gang.checkpoints.CheckpointLedger",
            "inherit",
            lambda self, known: None,
        ),
    ],
    ids=["any rank completes", "order of clocks", "not on all nodes", "no wait", "no memory"],
)
def test_the_simulation_finds_a_planted_bug(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, planted: Callable[..., object]
) -> None:
    monkeypatch.setattr(f"{owner}.{name}", planted)
    for seed in range(100):
        simulation = Simulation(seed, 2, pauses=3, is_suspended=True)
        simulation.run()
        if simulation.violations:
            return
    raise AssertionError("not found")
