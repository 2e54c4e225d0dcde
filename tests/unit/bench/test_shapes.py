"""The pure parts of the comparison: bodies, counts of requests, ratios and tables."""

from pathlib import Path

import msgspec
import pytest

from torchrun_bench import api_requests, bodies, plans, shapes
from torchrun_bench.bare import Writes
from torchrun_bench.competitors import (
    COMPETITORS,
    CONTROLLER,
    JOBSET_ALONE,
    JOBSET_SERVICE,
    configuration,
)
from torchrun_bench.options import QUICK, Options
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


def test_the_bare_client_sends_the_writes_of_the_controller_and_the_status_last():
    writes = msgspec.json.decode(plans.same_writes(2), type=Writes)
    requests = [write for (write,) in writes.created]
    kinds = [msgspec.json.decode(write.body)["kind"] for write in requests]
    assert kinds == ["Secret", "Job", "Service", "TorchrunJob"]
    assert [write.method for write in requests] == ["POST", *["PATCH"] * 3]
    assert "/status?" in requests[-1].path
    ((post,),) = msgspec.json.decode(plans.only_the_job(2), type=Writes).created
    assert (post.method, msgspec.json.decode(post.body)["spec"]["parallelism"]) == ("POST", 2)


def test_a_service_is_not_written_for_one_node():
    requests = [
        write for (write,) in msgspec.json.decode(plans.same_writes(1), type=Writes).created
    ]
    assert [msgspec.json.decode(write.body)["kind"] for write in requests] == ["Job", "TorchrunJob"]


def test_a_restart_is_compared_with_jobset():
    def restarted(name: str, **fields: float) -> Restarted:
        return Restarted(name, 1100, **({"ready": 0.3, "first_action": 0.4, "cpu": 0.5,
                                         "writes": 0} | fields), requests={})  # fmt: skip

    rows = shapes.rows([restarted("controller", writes=1, ready=0.6), restarted("JobSet")])
    assert [(row.controller, row.ratio) for row in rows] == [
        (1, None),
        (0.6, 2),
        (0.4, 1),
        (0.5, 1),
    ]
    assert shapes.rows([restarted("JobSet")]) == []


def test_a_burst_of_large_gangs_is_smaller():
    assert [shapes.jobs_of(nodes, Options()) for nodes in (1, 8, 256)] == [1000, 1000, 250]
    assert shapes.jobs_of(256, QUICK) >= 1


def test_the_table_has_a_line_for_each_size_and_competitor_in_one_order():
    turns = [
        a_turn("JobSet", round=0, rate=40, requests={"post jobs": 1.0, "post services": 1.0}),
        a_turn("controller", round=0, rate=100),
        a_turn("controller", round=1, rate=120),
        a_turn("controller", nodes=8, round=0, rate=90),
    ]
    assert shapes.table(turns).splitlines()[2:] == [
        "| 2 | controller | 10 | 20 | 110 (100-120) | 1 | 5 | 60 | 1 |",
        "| 2 | JobSet | 10 | 20 | 40 | 1 | 5 | 60 | 2 |",
        "| 8 | controller | 10 | 20 | 90 | 1 | 5 | 60 | 1 |",
    ]


def test_jobset_with_and_without_its_service_are_one_program():
    assert JOBSET_SERVICE.start is JOBSET_ALONE.start
    assert JOBSET_SERVICE.body("gang", 2) != JOBSET_ALONE.body("gang", 2)
