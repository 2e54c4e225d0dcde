"""What decision 0011 assumes of the real Job controller: how it replaces a single pod.

There is no kubelet: the tests set the status of pods.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from integration.controller_process import Api, eventually
from integration.team import Team, pod_status

NODE = "without-kubelet"
SIZE = 3
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
BACKOFF = 10  # seconds: DefaultJobPodFailureBackOff of job_controller.go


@pytest.fixture(scope="module", autouse=True)
def _node(api: Api) -> Iterator[None]:
    """A node that the pods are on: pods without a node end at once when they are deleted."""
    api.create("/api/v1/nodes", {"metadata": {"name": NODE}})
    yield
    api.delete(f"/api/v1/nodes/{NODE}")


class IndexedJob:
    """A Job with a running pod of each index."""

    def __init__(self, team: Team, name: str, **spec: object) -> None:
        self.name, self._team = name, team
        pod = {
            "nodeName": NODE,
            "restartPolicy": "Never",
            "containers": [{"name": "trainer", "image": "none"}],
        }
        size = {"completions": SIZE, "parallelism": SIZE, "completionMode": "Indexed"}
        policy = {"podReplacementPolicy": "Failed", "template": {"spec": pod}}
        body = {"metadata": {"name": name}, "spec": {**size, **policy, **spec}}
        team.api.create(f"{team.batch}/jobs", body)
        for index in range(SIZE):
            self.set(self.find(index), "Running")
        self.first = {index: self.find(index) for index in range(SIZE)}

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._team.api.get(f"{self._team.batch}/jobs/{self.name}")[
            "status"
        ]
        return status

    def pods(self, index: int) -> list[Any]:
        """The pods of an index, also those that have ended."""
        pods = self._team.api.items(f"{self._team.core}/pods", f"job-name={self.name}")
        return [pod for pod in pods if pod["metadata"]["annotations"][INDEX] == str(index)]

    def find(self, index: int, *earlier: Any) -> Any:
        """The pod of an index, other than the earlier ones."""
        uids = {pod["metadata"]["uid"] for pod in earlier}

        def look() -> Any:
            new = (pod for pod in self.pods(index) if pod["metadata"]["uid"] not in uids)
            return next(new, None)

        return eventually(f"a pod of index {index} of {self.name}", look)

    def set(self, pod: Any, phase: str) -> Any:
        """Set the phase, as the kubelet does; the pod with its new status."""
        name = pod["metadata"]["name"]
        status = pod_status(name, phase)
        if phase == "Failed":
            now = self._team.api.client.get("/version").headers["date"]
            ended = datetime.strptime(now, "%a, %d %b %Y %H:%M:%S %Z")
            terminated = status["containerStatuses"][0]["state"]["terminated"]
            terminated["finishedAt"] = f"{ended:%Y-%m-%dT%H:%M:%SZ}"
        return self._team.api.patch(f"{self._team.core}/pods/{name}/status", {"status": status})

    def delete(self, pod: Any, grace: int) -> None:
        name = pod["metadata"]["name"]
        path = f"{self._team.core}/pods/{name}"
        body = {"gracePeriodSeconds": grace}
        self._team.api.client.request("DELETE", path, json=body).raise_for_status()

    def fail(self, index: int, *earlier: Any) -> tuple[Any, float]:
        """Fail the pod of an index. The new one, and the seconds from the failure to it."""
        failed = self.set(self.find(index, *earlier), "Failed")
        new = self.find(index, failed, *earlier)
        return new, seconds(failed, new)

    def keeps(self, *indexes: int) -> bool:
        """Whether the first pods of these indexes are still there."""
        return all(
            self.find(index)["metadata"]["uid"] == self.first[index]["metadata"]["uid"]
            for index in indexes
        )


def seconds(failed: Any, new: Any) -> float:
    """From the end of a container to the creation of the next pod; both in whole seconds."""
    (container,) = failed["status"]["containerStatuses"]
    end = datetime.fromisoformat(container["state"]["terminated"]["finishedAt"])
    creation = datetime.fromisoformat(new["metadata"]["creationTimestamp"])
    return (creation - end).total_seconds()


@pytest.fixture
def make_job(team: Team) -> Callable[..., IndexedJob]:
    return lambda name, **spec: IndexedJob(team, name, **spec)


@pytest.mark.long
def test_an_index_is_replaced_alone_and_waits_for_its_own_failures(
    make_job: Callable[..., IndexedJob],
) -> None:
    job = make_job("each", backoffLimitPerIndex=1000)
    second, wait = job.fail(1)
    assert BACKOFF - 1 <= wait < 2 * BACKOFF - 1
    assert second["metadata"]["annotations"][FAILURES] == "1"
    assert second["spec"]["hostname"] == "each-1"
    assert job.keeps(0, 2)
    _, wait = job.fail(2)
    assert BACKOFF - 1 <= wait < 2 * BACKOFF - 1, "an index does not wait for another one"
    third, wait = job.fail(1, job.first[1])
    assert wait >= 2 * BACKOFF - 1
    assert third["metadata"]["annotations"][FAILURES] == "2"
    assert job.keeps(0)
    status = job.status()
    assert (status["failed"] > 1, status["failedIndexes"]) == (True, "")
    assert "conditions" not in status


@pytest.mark.long
def test_with_one_limit_for_all_each_failure_delays_every_index(
    make_job: Callable[..., IndexedJob],
) -> None:
    job = make_job("all", backoffLimit=1000)
    second, _ = job.fail(1)
    assert FAILURES not in second["metadata"]["annotations"], "no pod knows that it is a new one"
    _, wait = job.fail(2)
    assert wait >= 2 * BACKOFF - 1


def test_the_failed_pod_stays_until_the_new_one_exists(make_job: Callable[..., IndexedJob]) -> None:
    job = make_job("kept", backoffLimitPerIndex=1000)
    failed = job.set(job.first[1], "Failed")
    job.delete(failed, 0)

    def new() -> set[str]:
        uids = {pod["metadata"]["uid"] for pod in job.pods(1)}
        assert uids, "its finalizer stays"
        return uids - {failed["metadata"]["uid"]}

    eventually("the new pod", new)


def test_a_pod_that_terminates_is_replaced_only_when_it_has_failed(
    make_job: Callable[..., IndexedJob],
) -> None:
    job = make_job("deleted", backoffLimitPerIndex=1000)
    job.delete(job.first[1], 600)
    job.delete(job.first[2], 0)
    eventually("two terminate", lambda: job.status().get("terminating") == 2)
    second, wait = job.fail(1)
    assert wait >= BACKOFF - 1
    assert second["metadata"]["annotations"][FAILURES] == "1"
    still = job.find(2)["metadata"]
    assert still["uid"] == job.first[2]["metadata"]["uid"], "no kubelet, no end: a lost node"
    assert still["deletionTimestamp"]


def test_a_job_ends_once_its_limit_for_all_indexes_is_0(
    make_job: Callable[..., IndexedJob], team: Team
) -> None:
    """So the controller ends a gang: the Job creates no new pods, and ends the others."""
    job = make_job("ended", backoffLimitPerIndex=1000)
    path = f"{team.batch}/jobs/ended"
    assert team.api.get(path)["spec"]["backoffLimit"] == 2**31 - 1
    job.set(job.first[1], "Failed")
    eventually("the failure counts", lambda: job.status().get("failed") == 1)
    assert "conditions" not in job.status()
    team.api.patch(path, {"spec": {"backoffLimit": 0}})
    conditions = eventually("the Job ends", lambda: job.status().get("conditions"))
    assert conditions[0]["reason"] == "BackoffLimitExceeded"
    others = (0, 2)
    eventually(
        "the others terminate",
        lambda: all("deletionTimestamp" in job.find(index)["metadata"] for index in others),
    )


def test_pods_of_a_job_that_resumes_replace_none(
    make_job: Callable[..., IndexedJob], team: Team
) -> None:
    job = make_job("resumed", backoffLimitPerIndex=1000)
    path = f"{team.batch}/jobs/resumed"
    team.api.patch(path, {"spec": {"suspend": True}})
    eventually("all terminate", lambda: job.status().get("terminating") == SIZE)
    for pod in job.first.values():
        job.set(pod, "Failed")
        job.delete(pod, 0)
    selector = "job-name=resumed"
    eventually("no pods", lambda: not team.api.items(f"{team.core}/pods", selector))
    team.api.patch(path, {"spec": {"suspend": False}})
    for index in range(SIZE):
        assert job.find(index)["metadata"]["annotations"][FAILURES] == "0"
