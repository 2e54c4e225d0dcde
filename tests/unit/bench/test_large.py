"""The pure parts of the bench of one large gang."""

from torchrun_bench import large
from torchrun_bench.processes import Requests, Usage


def test_the_pods_of_the_plain_job_are_known_to_the_watch_by_their_labels():
    job = large.labelled_job(1000, 1)
    template = job["spec"]["template"]
    assert template["metadata"]["labels"] == {
        "torchrun-job-name": "gang",
        "torchrun.ai/attempt": "1",
    }
    assert job["metadata"] == {"name": "gang-1", "namespace": "bench-bare"}
    assert job["spec"]["parallelism"] == 1000


def test_the_same_pods_are_those_of_the_controller():
    job = large.same_job(1000, 1)
    assert job["metadata"]["name"] == "gang-1"
    assert "ownerReferences" not in job["metadata"]
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["torchrun.ai/attempt"] == "1"
    assert template["metadata"]["labels"]["torchrun-job-name"] == "gang"
    (trainer,) = template["spec"]["containers"]
    hosts = [entry["value"] for entry in trainer["env"] if entry["name"] == "PET_MASTER_ADDR"]
    assert hosts == ["gang-0.gang.bench-bare.svc"]


def test_the_service_selects_the_same_pods():
    service, template = large.same_service(), large.same_job(1000, 1)["spec"]["template"]
    assert service["metadata"]["name"] == template["spec"]["subdomain"]
    assert service["metadata"]["namespace"] == "bench-bare"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_the_figures_are_beside_plain_and_beside_the_same_pods():
    ours, other = large.Steps(1.0, 2.0, 3.0, 4.0), large.Steps(1.0, 2.0, 2.0, 4.0)
    started = Requests({("patch", "jobs.batch"): 1, ("post", "events.events.k8s.io"): 2})
    restarted = Requests({("delete", "pods"): 21, ("post", "events.events.k8s.io"): 1})
    cost = large.Cost(2.5, 3.5, started, restarted, 1868, Usage(1.0, 70.0, 65.0))
    made = {row.what: row for row in large.rows(1000, ours, other, ours, cost)}
    failed = "gang of 1,000: first failed pod to all new pods created"
    assert made[f"{failed}, beside a plain Job"].ratio == 1.5
    assert made[f"{failed}, beside the same pods"].ratio == 1.0
    assert made["gang of 1,000: events"].controller == 3
    assert made["gang of 1,000: writes for the restart"].controller == 21
