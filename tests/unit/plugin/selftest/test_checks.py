"""What the self-test concludes from what its ranks have told and from the status."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kubectl_torchrun.cluster.slices import FailureSlice, JobStatusSlice, NetworkSlice
from kubectl_torchrun.selftest.checks import JOBS, CheckResult, judge
from kubectl_torchrun.selftest.facts import (
    SAVED_STEP,
    JobRecord,
    RankFact,
    RankVersions,
    parse_event,
)

CPU = RankVersions(world=2, backend="gloo", python="3.12.3", torch="2.9.0")
GPU = replace(CPU, backend="nccl", gpu="NVIDIA H100")
DONE = JobStatusSlice(phase="Succeeded", reason="Completed", num_nodes=2)
IB = (NetworkSlice(transport="IB", nodes=2),)


def start(
    attempt: int,
    round_: int,
    saved: int,
    at: float,
    first: int | None = None,
    free: int | None = None,
) -> tuple[RankFact, ...]:
    """A start of two ranks, each of which tells its first step."""
    where = {"attempt": attempt, "round": round_, "at": at, "time": 1000 + at}
    first = saved + 1 if first is None else first
    return tuple(
        event
        for rank in (0, 1)
        for event in (
            RankFact("start", rank, step=saved, free=free, **where),
            RankFact("step", rank, step=first, **where),
        )
    )


BEGIN = start(0, 0, 0, 10, free=80 << 30)
BREAKS = RankFact("breaks", 1, at=20, time=1020)
AGAIN = start(0, 1, SAVED_STEP, 24, free=80 << 30)
STOPPED = tuple(RankFact("stopped", rank, step=77, at=30) for rank in (0, 1))
KILLED = replace(DONE, last_failure=FailureSlice(rank=1, signal=9, reason="Signaled"))
HUNG = replace(DONE, last_failure=FailureSlice(rank=1, reason="Hung"))
SIZES = tuple(
    RankFact("bandwidth", bytes=size, seconds=0.001, correct=True) for size in (1 << 10, 1 << 20)
)
# A run of each job in which all is well.
GOOD: Mapping[str, JobRecord] = {
    "bandwidth": JobRecord(SIZES, CPU, DONE),
    "kill": JobRecord((*BEGIN, BREAKS, *AGAIN), GPU, KILLED, IB),
    "delete": JobRecord((*BEGIN, *start(1, 0, SAVED_STEP, 29)), CPU, DONE, acts={"deleted": 21.0}),
    "hang": JobRecord((*BEGIN, BREAKS, *AGAIN), CPU, HUNG, still=frozenset({1}), stacks=2),
    "stop": JobRecord((*BEGIN, *STOPPED, *start(1, 0, 77, 45)), CPU, DONE, acts={"resumed": 40.0}),
}


def result(job: str, check: str, run: JobRecord) -> CheckResult:
    return next(each for each in judge(JOBS[job], run) if each.check.name == check)


@pytest.mark.parametrize(
    ("job", "check", "seconds", "seen"),
    [
        ("bandwidth", "bandwidth", None, "up to 1.05 GB/s bus bandwidth, at 1.0 MiB"),
        ("kill", "transport", None, "IB on 2 nodes"),
        ("kill", "kill", 4, "the same pods, resumed from step 20; root cause: rank 1, signal 9"),
        ("kill", "memory", None, "at most 0 B less than before, on rank 0"),
        ("delete", "delete", 8, "a new gang, resumed from step 20"),
        ("hang", "hang", 4, "the same pods, resumed from step 20; reason Hung; stacks of 2 ranks"),
        ("stop", "stop", 5, "all ranks stopped at step 77; a new gang, resumed from step 77"),
    ],
)
def test_a_check_passes(job: str, check: str, seconds: float | None, seen: str) -> None:
    found = result(job, check, GOOD[job])
    assert (found.verdict, found.reason, found.found.seen) == ("passed", "", seen)
    if seconds is not None:
        assert found.found.seconds == pytest.approx(seconds)


def test_bandwidth_is_that_of_nccl_tests() -> None:
    four = GOOD["bandwidth"]._replace(versions=replace(CPU, world=4))
    (_, mebi) = result("bandwidth", "bandwidth", four).found.sizes
    assert (round(mebi.algorithm, 3), round(mebi.bus, 3)) == (1.049, 1.573)


FAILED = JobStatusSlice(phase="Failed", reason="TorchMissing", message="pod a-0-x on node-7")


@pytest.mark.parametrize(
    ("job", "check", "changes", "reason"),
    [
        (
            "bandwidth", "bandwidth", {"events": (replace(SIZES[0], correct=False),)},
            "wrong sums at 1.0 KiB",
        ),
        (
            "bandwidth", "bandwidth", {"status": FAILED},
            "The image of the queue has no torch. Select a queue whose image has it, with --queue",
        ),
        (
            "bandwidth", "bandwidth",
            {"status": JobStatusSlice(phase="Queued", reason="ExceedsNodes"), "why": "no rank yet"},
            "no rank yet: the job is Queued (ExceedsNodes)",
        ),
        (
            "bandwidth", "bandwidth",
            {"status": JobStatusSlice(phase="Failed", reason="pod a-0-x on node-7")},
            "the job is Failed (an unknown reason)",
        ),
        ("kill", "transport", {"slow": "FallbackToTCP"}, "SlowNetwork is True: FallbackToTCP"),
        ("kill", "transport", {"network": ()}, "the network of 2 of 2 nodes is unknown"),
        ("kill", "kill", {"events": (*BEGIN, BREAKS)}, "the ranks did not start again"),
        (
            "kill", "kill", {"events": (*BEGIN, BREAKS, *start(0, 1, 0, 24))},
            "the ranks resumed from step 0, not 20",
        ),
        (
            "kill", "kill", {"events": (*BEGIN, BREAKS, *start(1, 0, 20, 24))},
            "a new gang started, and not the ranks in the same pods",
        ),
        ("kill", "kill", {"status": DONE}, "the status has no root cause"),
        (
            "kill", "kill",
            {"status": replace(DONE, last_failure=FailureSlice(rank=0, exit_code=1))},
            "the root cause is not rank 1 with signal 9",
        ),
        (
            "kill", "memory",
            {"events": (*BEGIN, BREAKS, *start(0, 1, SAVED_STEP, 24, free=79 << 30))},
            "a killed rank has kept 1.0 GiB",
        ),
        (
            "delete", "delete", {"status": replace(DONE, restarts=1)},
            "the deletion counts as a failure towards maxRestarts",
        ),
        ("hang", "hang", {"status": KILLED}, "the reason of the failure is Signaled"),
        (
            "hang", "hang", {"still": frozenset({0, 1})},
            "the stacks show that 0, 1 hangs, and not rank 1",
        ),
        (
            "stop", "stop", {"events": (*BEGIN, STOPPED[0], *start(1, 0, 77, 45))},
            "1 of 2 ranks have stopped with a checkpoint, at: 77",
        ),
        (
            "stop", "stop", {"events": (*BEGIN, *STOPPED, *start(1, 0, 77, 45, first=79))},
            "the first step was not 78",
        ),
    ],
)  # fmt: skip
def test_a_check_fails(job: str, check: str, changes: dict[str, object], reason: str) -> None:
    found = result(job, check, GOOD[job]._replace(**changes))
    assert (found.verdict, found.reason) == ("failed", reason)


@pytest.mark.parametrize(
    ("check", "changes", "reason"),
    [
        ("memory", {"events": start(0, 0, 0, 10)}, "the ranks have no GPUs"),
        (
            "transport", {"status": replace(KILLED, num_nodes=1)},
            "one node has no network between its ranks",
        ),
    ],
)  # fmt: skip
def test_a_check_does_not_apply(check: str, changes: dict[str, object], reason: str) -> None:
    found = result("kill", check, GOOD["kill"]._replace(**changes))
    assert (found.verdict, found.reason) == ("skipped", reason)


def test_facts_are_found_in_marked_lines_only() -> None:
    line = b'[default1]:torchrun-selftest: {"kind": "versions", "rank": 1, "world": 4, "gpu": null}'
    event, versions = parse_event(line, at=3.0)
    assert event == RankFact("versions", 1, at=3.0)
    assert versions == RankVersions(world=4)
    for other in (b"loss 3", b"torchrun-selftest: {", b'torchrun-selftest: {"kind": 3}'):
        assert parse_event(other, at=3.0) == (None, None)
