"""The pods of a job, and those of a deleted job of the same name."""

import msgspec
import pytest

from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import Api
from kubectl_torchrun.cluster.http_client import HttpClient
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.slices import JobSlice
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod

from ..laptop import Laptop


def pod(name: str, uid: str, *, owned: bool) -> Pod:
    """A pod of the job with this UID; owned: by the job itself, as sync pods are."""
    kind = "TorchrunJob" if owned else "Job"
    owner: JsonObject = {"kind": kind, "uid": uid if owned else "of-a-job", "controller": True}
    body: JsonObject = {
        "metadata": {
            "name": name,
            "labels": {"torchrun.ai/job-uid": uid},
            "ownerReferences": [owner],
        }
    }
    return msgspec.convert(body, Pod)


@pytest.mark.parametrize("owned", [True, False], ids=["sync pod", "worker"])
@pytest.mark.parametrize("first", ["job", "pods"])
def test_pods_of_a_deleted_job_do_not_count(owned: bool, first: str) -> None:
    job_watch = JobWatch(Api(HttpClient(""), "ns", Retries()), "run")
    job = msgspec.convert({"metadata": {"name": "run", "uid": "new"}}, JobSlice)
    pods = {name: pod(name, name, owned=owned) for name in ("old", "new")}
    if first == "job":
        job_watch.show_job(job)
        job_watch.show_pods(pods)
    else:
        job_watch.show_pods(pods)
        job_watch.show_job(job)
    assert set(job_watch.pods) == {"new"}


def test_a_job_that_replaces_the_known_one_counts_as_deleted() -> None:
    job_watch = JobWatch(Api(HttpClient(""), "ns", Retries()), "run", uid="old")
    job_watch.show_job(msgspec.convert({"metadata": {"name": "run", "uid": "new"}}, JobSlice))
    assert job_watch.has_read
    assert job_watch.job is None


@pytest.mark.long
def test_logs_are_those_of_the_job(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running", "startTime": "2026-01-01T00:00:00Z"})
    old = laptop.worker("run", 0, 3, "2026-01-01T00:00:00.000000000Z of the deleted job\n")
    laptop.server.put(
        "pods",
        old,
        metadata={"labels": {"torchrun-job-name": "run", "torchrun.ai/job-uid": "another"}},
    )
    laptop.worker("run", 1, 0, "2026-01-01T00:00:01.000000000Z of this job\n")
    assert "of this job" in laptop.run("logs", "run").stdout
    assert "of the deleted job" not in laptop.run("logs", "run").stdout
