"""The arithmetic of the bench: nobody would notice wrong figures."""

import json

import pytest

from torchrun_bench import report, spread
from torchrun_bench.frames import FIRST_VERSION, PODS_OF_ALL, chunks
from torchrun_bench.processes import Requests

COUNTED = {
    ("patch", "jobs.batch"): 10,
    ("patch", "torchrunjobs.torchrun.ai/status"): 12,
    ("post", "events.events.k8s.io"): 9,
    ("patch", "leases.coordination.k8s.io"): 4,
    ("get", "apis"): 3,
    ("watch", "pods"): 1,
}


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRUN_BENCH_QUICK", raising=False)


def test_writes_are_neither_reads_nor_events_nor_the_lease() -> None:
    assert Requests(COUNTED).writes == 22
    assert Requests(COUNTED).all == 35


def test_requests_since_a_moment_are_the_difference() -> None:
    before = Requests({("patch", "jobs.batch"): 7, ("get", "apis"): 3})
    since = Requests(COUNTED).since(before)
    assert since.by_kind[("patch", "jobs.batch")] == 3
    assert ("get", "apis") not in since.by_kind


@pytest.mark.parametrize(
    ("ours", "bare", "bound", "met"),
    [(13, 10, ("<=", 1.3), True), (13.1, 10, ("<=", 1.3), False), (7, 10, (">=", 0.8), False)],
)
def test_a_ratio_is_judged(ours: float, bare: float, bound: tuple[str, float], met: bool) -> None:
    made = report.row("latency", "ms", ours, bare, ratio=bound)
    assert (made.met, made.ratio) == (met, pytest.approx(ours / bare))
    assert f"| {'yes' if met else 'NO'} |" in report.table([made])


def test_a_bound_is_judged_and_a_smoke_run_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not report.row("memory", "MiB", 501, most=500.0).met
    assert not report.row("writes", "", 1, most=0).met
    monkeypatch.setenv("TORCHRUN_BENCH_QUICK", "1")
    assert report.row("memory", "MiB", 501, most=500.0).met


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_that_of_the_growth(power: float) -> None:
    sizes = [100, 1000, 10_000]
    costs = [3 * size**power for size in sizes]
    assert report.exponent(sizes, costs) == pytest.approx(power)


def test_frames_are_of_many_pods_with_a_version_each() -> None:
    lines = b"".join(chunks(0, 25)).splitlines()
    objects = [json.loads(line)["object"]["metadata"] for line in lines]
    assert [int(o["resourceVersion"]) for o in objects] == [FIRST_VERSION + n for n in range(1, 26)]
    assert len({o["name"] for o in objects}) == len({o["uid"] for o in objects}) == 25
    assert len({o["labels"]["torchrun-job-name"] for o in objects}) == 3
    again = next(iter(chunks(PODS_OF_ALL, 1)))
    assert json.loads(again)["object"]["metadata"]["name"] == objects[0]["name"]
    assert 8000 < len(lines[0]) < 10_000, "the size of real pods"


def test_several_runs_are_their_median_and_their_spread() -> None:
    runs = [
        [report.row("latency", "ms", ours, 10, ratio=("<=", 1.3))] for ours in (12.0, 11.0, 15.0)
    ]
    line = spread.table(runs).splitlines()[-1]
    assert line == ("| latency | 3 | 12 (11-15) ms | 10 ms | 1.2 (1.1-1.5) | <= 1.3 x | 2 of 3 |")
