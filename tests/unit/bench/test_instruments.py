"""The arithmetic of the bench: nobody would notice wrong figures."""

import json

from torchrun_bench import report
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


def test_writes_are_neither_reads_nor_events_nor_the_lease() -> None:
    assert Requests(COUNTED).writes == 22


def test_requests_since_a_moment_are_the_difference() -> None:
    before = Requests({("patch", "jobs.batch"): 7, ("get", "apis"): 3})
    since = Requests(COUNTED).since(before)
    assert since.by_kind[("patch", "jobs.batch")] == 3
    assert ("get", "apis") not in since.by_kind


def test_a_figure_is_shown_with_its_ratio() -> None:
    made = report.row("latency", "ms", 13, 10)
    assert report.table([made]).splitlines()[-1] == "| latency | ms | 13 | 10 | 1.30 |"
    alone = report.row("memory", "MiB", 64.61234)
    assert report.table([alone]).splitlines()[-1] == "| memory | MiB | 64.612 |  |  |"


def test_frames_are_of_many_pods_with_a_version_each() -> None:
    lines = b"".join(chunks(0, 25)).splitlines()
    objects = [json.loads(line)["object"]["metadata"] for line in lines]
    assert [int(o["resourceVersion"]) for o in objects] == [FIRST_VERSION + n for n in range(1, 26)]
    assert len({o["name"] for o in objects}) == len({o["uid"] for o in objects}) == 25
    assert len({o["labels"]["torchrun-job-name"] for o in objects}) == 3
    again = next(iter(chunks(PODS_OF_ALL, 1)))
    assert json.loads(again)["object"]["metadata"]["name"] == objects[0]["name"]
    assert 8000 < len(lines[0]) < 10_000, "the size of real pods"


def test_several_values_are_their_median_and_their_range() -> None:
    assert report.spread([12.0, 11.0, 15.0]) == "12 (11-15)"
    assert report.spread([3.001, 3.002]) == "3"
