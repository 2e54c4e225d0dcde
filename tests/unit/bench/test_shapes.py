"""The pure parts of the comparison: bodies, counts of requests, ratios and tables."""

from pathlib import Path

import msgspec
import pytest

from torchrun_bench import api_requests, bodies, page, plans, shapes
from torchrun_bench.bare import Writes
from torchrun_bench.competitors import (
    APPLY,
    COMPETITORS,
    CONTROLLER,
    JOBSET_ALONE,
    JOBSET_SERVICE,
    POST,
    configuration,
)
from torchrun_bench.options import QUICK, Options
from torchrun_bench.results import Run, stored
from torchrun_bench.turns import Restarted, Turn

METRICS = """# TYPE apiserver_request_total counter
apiserver_request_total{code="201",component="apiserver",dry_run="",group="batch",resource="jobs",scope="namespace",subresource="",verb="APPLY",version="v1"} 7
apiserver_request_total{code="409",component="apiserver",dry_run="",group="batch",resource="jobs",scope="namespace",subresource="",verb="APPLY",version="v1"} 2
apiserver_request_total{code="200",component="apiserver",dry_run="",group="torchrun.ai",resource="torchrunjobs",scope="resource",subresource="status",verb="APPLY",version="v1alpha1"} 5
apiserver_request_total{code="201",component="apiserver",dry_run="",group="torchrun.ai",resource="torchrunjobs",scope="resource",subresource="",verb="POST",version="v1alpha1"} 10
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1"} 3
apiserver_request_total{code="200",component="apiserver",dry_run="",group="coordination.k8s.io",resource="leases",scope="resource",subresource="",verb="PUT",version="v1"} 9
apiserver_request_duration_seconds_count{group="batch",resource="jobs",verb="APPLY"} 99
"""


def a_turn(name: str, **fields: object) -> Turn:
    figures: dict[str, object] = {
        "competitor": name, "nodes": 2, "round": 0, "jobs": 1000, "p50": 10.0, "p99": 20.0,
        "rate": 100.0, "cpu_ms": 1.0, "api_cpu_ms": 5.0, "etcd_cpu_ms": 1.0, "peak_mib": 60.0,
        "requests": {"apply jobs": 1.0},
    }  # fmt: skip
    return msgspec.convert(figures | fields, Turn)


def test_requests_are_counted_over_all_codes_without_watches_and_leases():
    assert api_requests.parse(METRICS) == {
        "apply jobs": 9,
        "apply torchrunjobs/status": 5,
        "post torchrunjobs": 10,
    }


def test_requests_of_the_load_are_not_those_of_the_competitor():
    now = {"apply jobs": 9.0, "post torchrunjobs": 10.0, "get jobs": 4.0}
    left = api_requests.since(now, {"apply jobs": 2.0, "get jobs": 4.0}, {"post torchrunjobs": 10})
    assert left == {"apply jobs": 7.0}


def test_reads_reviews_and_events_are_not_writes():
    counts = {"apply jobs": 2.0, "put jobsets/status": 1.0, "post events": 5.0, "get jobs": 6.0,
              "post selfsubjectaccessreviews": 7.0, "list pods": 8.0}  # fmt: skip
    assert api_requests.writes(counts) == 3.0


@pytest.mark.parametrize("service", [True, False])
def test_a_jobset_is_the_plain_job_with_its_policies(service: bool):
    jobset = bodies.jobset("gang", 8, service=service)
    spec = jobset["spec"]
    assert isinstance(spec, dict)
    assert spec["network"] == {"enableDNSHostnames": service, "publishNotReadyAddresses": True}
    (replicated,) = spec["replicatedJobs"]
    plain = bodies.plain_job("gang", "team", "uid", 8)["spec"]
    job = replicated["template"]["spec"]
    for body in (job, plain):
        assert (body["parallelism"], body["completions"]) == (8, 8)
        (env,) = [each for each in body["template"]["spec"]["containers"][0]["env"]
                  if each["name"] == "PET_MASTER_ADDR"]  # fmt: skip
        env["value"] = ""
    assert job == plain


def test_the_child_of_a_jobset_has_the_name_that_jobset_gives_it():
    assert JOBSET_SERVICE.child.format("gang") == "gang-workers-0"
    assert CONTROLLER.child.format("gang") == "gang"
    assert [one.resource for one in COMPETITORS] == [*["torchrunjobs"] * 3, *["jobsets"] * 2]


def test_the_configuration_of_jobset_has_free_ports(tmp_path: Path):
    written = configuration(tmp_path, 4711)
    assert written["leaderElection"] == {"leaderElect": False}
    assert written["health"] == {"healthProbeBindAddress": "127.0.0.1:4711"}
    assert isinstance(written["webhook"], dict)
    assert written["webhook"]["certDir"] == str(tmp_path)
    assert written["webhook"]["port"] != 4711


def test_the_bare_client_creates_the_job_then_its_service_and_sends_the_status_last():
    writes = msgspec.json.decode(plans.same_writes(2), type=Writes)
    requests = [write for (write,) in writes.created]
    kinds = [msgspec.json.decode(write.body)["kind"] for write in requests]
    assert kinds == ["Job", "Service", "TorchrunJob"]
    assert [write.method for write in requests] == ["PATCH"] * 3
    assert "/status?" in requests[-1].path
    ((post,),) = msgspec.json.decode(plans.only_the_job(2), type=Writes).created
    assert (post.method, msgspec.json.decode(post.body)["spec"]["parallelism"]) == ("POST", 2)


def test_a_service_is_not_written_for_one_node():
    requests = [
        write for (write,) in msgspec.json.decode(plans.same_writes(1), type=Writes).created
    ]
    assert [msgspec.json.decode(write.body)["kind"] for write in requests] == ["Job", "TorchrunJob"]


def test_a_ratio_is_the_median_of_the_rounds_and_not_of_the_figures():
    turns = [
        *(a_turn("controller", round=n, rate=rate) for n, rate in enumerate((50, 100, 400))),
        *(a_turn("bare POST", round=n, rate=rate) for n, rate in enumerate((100, 100, 500))),
        a_turn("controller", nodes=8, round=0, rate=1),
    ]
    assert shapes.ratio(turns, "rate", 2, POST) == pytest.approx(0.8)
    assert shapes.ratio(turns, "rate", 2, APPLY) is None
    assert shapes.ratio(turns, "rate", 8, POST) is None
    assert shapes.median(turns, "rate", 2, CONTROLLER) == 100


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({}, []),
        ({"p50": 14.1}, ["beside bare POST", "beside JobSet"]),
        ({"p50": 10.1}, ["beside JobSet"]),
        ({"rate": 89.0}, ["beside bare apply"]),
        ({"cpu_ms": 0.7}, ["beside JobSet, no Service"]),
        ({"peak_mib": 75.5}, ["peak memory"]),
    ],
)
def test_the_targets_are_those_of_two_nodes(fields: dict[str, float], missed: list[str]):
    turns = [
        a_turn("controller", **({"cpu_ms": 0.5} | fields)),
        a_turn("bare apply"),
        a_turn("bare POST"),
        a_turn("JobSet"),
        a_turn("JobSet, no Service", rate=35.0),
        a_turn("controller", nodes=8, p50=1000.0),
    ]
    rows = shapes.rows(shapes.Figures(turns))
    assert len(rows) == 8
    found = [row.what for row in rows if not row.met]
    assert len(found) == len(missed)
    assert all(what.endswith(end) for what, end in zip(found, missed, strict=True))


def test_a_restart_writes_nothing_and_acts_as_early_as_jobset():
    def restarted(name: str, **fields: float) -> Restarted:
        return Restarted(name, 1100, **({"ready": 0.3, "first_action": 0.4, "cpu": 0.5,
                                         "writes": 0} | fields), requests={})  # fmt: skip

    ours = restarted("controller", writes=1, first_action=0.41)
    rows = shapes.rows(shapes.Figures([], [ours, restarted("JobSet")]))
    assert [row.met for row in rows] == [False, True, False]
    assert shapes.rows(shapes.Figures([], [restarted("JobSet")])) == []


def test_a_burst_of_large_gangs_is_smaller():
    assert [shapes.jobs_of(nodes, Options()) for nodes in (1, 8, 256)] == [1000, 1000, 250]
    assert shapes.jobs_of(256, QUICK) >= 1


def test_a_table_has_a_line_for_each_competitor_in_one_order():
    turns = [
        a_turn("JobSet", round=0, rate=40, requests={"post jobs": 1.0, "post services": 1.0}),
        a_turn("controller", round=0, rate=100),
        a_turn("controller", round=1, rate=120),
    ]
    text = page.shapes(Run(turns=turns))
    lines = [line for line in text.splitlines() if line.startswith(("| controller |", "| JobSet"))]
    assert [line.split(" | ")[0] for line in lines] == ["| controller", "| JobSet"]
    assert "| 110 (100-120) |" in lines[0]
    assert "| 2 | JobSet | 1.00 | 1.00 | 2.50 | 1.00 | 1.00 |" in text
    assert "| post services |  | 1.00 |" in text
    assert "restart with" not in text


def test_the_page_takes_the_newest_run_of_each_part():
    row = shapes.row("churn", "1/s", 5.0)
    old, new = (
        Run(turns=[a_turn("controller", rate=rate)], commit=commit, load=[1.0],
            rows=[msgspec.structs.replace(row, part="churn", controller=rate)])
        for commit, rate in (("old", 50.0), ("new", 60.0))
    )  # fmt: skip
    text = page.block({"20260101-000000": old, "20260102-000000": new})
    assert "`20260102-000000.json`: commit new" in text
    assert "commit old" not in text
    assert "| churn | 2 | 55 (50-60) 1/s |" in text
    whole = f"above\n{page.BEGIN}\nstale\n{page.END}\nbelow"
    replaced = page.with_figures(whole, {})
    assert replaced == f"above\n{page.BEGIN}\n\n{page.END}\nbelow"


def test_the_page_has_the_figures_of_the_stored_runs():
    assert page.block(stored()) in page.PAGE.read_text()


def test_jobset_with_and_without_its_service_are_one_program():
    assert JOBSET_SERVICE.start is JOBSET_ALONE.start
    assert JOBSET_SERVICE.body("gang", 2) != JOBSET_ALONE.body("gang", 2)
