"""Checks of the simulated Job controller and pod garbage collector, for conformance.py."""

from collections.abc import Awaitable, Callable
from datetime import datetime

from bodies import Body
from faults.conformance_api import CONFIG_MAPS, CONTAINER, NODE, Api, eventually
from torchrun_api.kinds import JOBS, PODS
from torchrun_api.names import CONTROLLER_UID_LABEL, FAILURE_COUNT

INDEX = "batch.kubernetes.io/job-completion-index"


async def _gang(
    api: Api, *, replaces: bool = False, **spec_of_pods: str
) -> tuple[Body, list[Body]]:
    """A Job with two pods, which fails with the first of them, or replaces single pods."""
    template = {
        "metadata": {"labels": {"g": "1"}},
        "spec": {"containers": [CONTAINER], "restartPolicy": "Never", **spec_of_pods},
    }
    size = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    limit = {"backoffLimitPerIndex": 1000} if replaces else {"backoffLimit": 0}
    spec = {**size, **limit, "podReplacementPolicy": "Failed", "template": template}
    job = await api.apply(JOBS, "gang", spec=spec)

    async def both() -> list[Body] | None:
        listed: list[Body] = (await api.send("GET", PODS, labelSelector="g=1"))["items"]
        return listed if len(listed) == 2 else None

    pods = await eventually(both)
    return job, sorted(pods, key=lambda pod: pod["metadata"]["name"])


async def _becomes(api: Api, pod: Body, phase: str) -> None:
    await api.send("PATCH", PODS, pod["metadata"]["name"], {"status": {"phase": phase}}, "status")


def _has_condition(kind: str) -> Callable[[Body], bool]:
    def has_condition(job: Body) -> bool:
        conditions = job.get("status", {}).get("conditions", ())
        return any(c["type"] == kind and c["status"] == "True" for c in conditions)

    return has_condition


async def a_job_creates_a_pod_for_each_index_and_completes_with_all(api: Api) -> None:
    job, pods = await _gang(api)
    for index, pod in enumerate(pods):
        meta = pod["metadata"]
        assert meta["name"].startswith(f"gang-{index}-")
        assert meta["labels"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert meta["labels"][CONTROLLER_UID_LABEL] == job["metadata"]["uid"]
        (owner,) = meta["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (job["metadata"]["uid"], True)
        await _becomes(api, pod, "Succeeded")
    done = await api.until(JOBS, "gang", _has_condition("Complete"))
    assert done["status"]["succeeded"] == 2


async def a_job_fails_with_the_first_failure_and_deletes_the_others(api: Api) -> None:
    _, pods = await _gang(api)
    await _becomes(api, pods[1], "Failed")
    await api.until(JOBS, "gang", _has_condition("Failed"))

    async def alone() -> bool:
        left = (await api.send("GET", PODS, labelSelector="g=1"))["items"]
        return [pod["metadata"]["name"] for pod in left] == [pods[1]["metadata"]["name"]]

    await eventually(alone)


async def a_job_has_not_failed_before_its_pods_have_ended(api: Api) -> None:
    _, pods = await _gang(api, nodeName=NODE)
    names = [pod["metadata"]["name"] for pod in pods]
    await _becomes(api, pods[1], "Failed")
    await api.until(PODS, names[0], lambda pod: pod["metadata"].get("deletionTimestamp"))
    ending = await api.until(JOBS, "gang", lambda job: job["status"].get("failed"))
    assert not _has_condition("Failed")(ending)
    await api.send("DELETE", PODS, names[0], {"gracePeriodSeconds": 0})
    await api.until(JOBS, "gang", _has_condition("Failed"))


async def _fails(api: Api, pod: Body) -> Body:
    """The kubelet reports that the container has ended. Returns an object of that time."""
    meta = pod["metadata"]
    end = await api.create(CONFIG_MAPS, f"end-of-{meta['name']}")
    terminated = {"exitCode": 143, "finishedAt": end["metadata"]["creationTimestamp"]}
    container = {"name": "trainer", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    statuses = [{**container, "state": {"terminated": terminated}}]
    status = {"phase": "Failed", "containerStatuses": statuses}
    await api.send("PATCH", PODS, meta["name"], {"status": status}, "status")
    return end


async def _next_pod(api: Api, index: int, *earlier: Body) -> Body:
    uids = {pod["metadata"]["uid"] for pod in earlier}

    async def look() -> Body | None:
        items = (await api.send("GET", PODS, labelSelector=f"g=1,{INDEX}={index}"))["items"]
        return next((pod for pod in items if pod["metadata"]["uid"] not in uids), None)

    return await eventually(look)


def _seconds_after(earlier: Body, later: Body) -> float:
    created = [datetime.fromisoformat(p["metadata"]["creationTimestamp"]) for p in (earlier, later)]
    return (created[1] - created[0]).total_seconds()


async def _loses(api: Api, pod: Body) -> tuple[Body, Body]:
    """Fail a pod of two. Returns the Job while it waits, and an object of the time of the failure.

    It counts the lost pod later, and up to Kubernetes 1.35 no pod as active, although one runs.
    """
    await api.until(JOBS, "gang", lambda job: job["status"].get("active") == 2)
    end = await _fails(api, pod)
    waits = await api.until(JOBS, "gang", lambda job: job["status"].get("active", 0) < 2)
    assert not waits["status"].get("failed")
    return waits, end


async def a_job_with_a_limit_for_each_index_replaces_a_pod_alone(api: Api) -> None:
    job, (first, lost) = await _gang(api, replaces=True, nodeName=NODE)
    assert job["spec"]["backoffLimit"] == 2**31 - 1
    assert [p["metadata"]["annotations"][FAILURE_COUNT] for p in (first, lost)] == ["0", "0"]
    waits, end = await _loses(api, lost)
    assert "conditions" not in waits["status"]
    await api.send("DELETE", PODS, lost["metadata"]["name"], {"gracePeriodSeconds": 0})
    assert (await _next_pod(api, 1))["metadata"]["uid"] == lost["metadata"]["uid"], "it is kept"
    second = await _next_pod(api, 1, lost)
    assert 9 <= _seconds_after(end, second) < 19
    assert second["metadata"]["annotations"][FAILURE_COUNT] == "1"
    assert (await _next_pod(api, 0))["metadata"]["uid"] == first["metadata"]["uid"]
    await api.until(JOBS, "gang", lambda job: job["status"].get("failed") == 1)
    for pod in (first, second):
        await _becomes(api, pod, "Succeeded")
    await api.until(JOBS, "gang", _has_condition("Complete"))
    left = (await api.send("GET", PODS, labelSelector="g=1"))["items"]
    assert {p["metadata"]["uid"] for p in left} == {p["metadata"]["uid"] for p in (first, second)}


async def each_replacement_of_an_index_doubles_the_delay(api: Api) -> None:
    _, (_, first) = await _gang(api, replaces=True, nodeName=NODE)
    await _fails(api, first)
    second = await _next_pod(api, 1, first)
    end = await _fails(api, second)
    third = await _next_pod(api, 1, first, second)
    assert 19 <= _seconds_after(end, third) < 39
    assert third["metadata"]["annotations"][FAILURE_COUNT] == "2"


async def a_pod_that_terminates_is_not_replaced_before_it_has_failed(api: Api) -> None:
    _, pods = await _gang(api, replaces=True, nodeName=NODE)
    for pod, grace in zip(pods, (0, 600), strict=True):
        await api.send("DELETE", PODS, pod["metadata"]["name"], {"gracePeriodSeconds": grace})
    await _fails(api, pods[1])
    await _next_pod(api, 1, pods[1])
    silent = await _next_pod(api, 0)
    assert silent["metadata"]["uid"] == pods[0]["metadata"]["uid"], "its finalizer keeps it"
    assert silent["metadata"]["deletionTimestamp"]


async def a_job_that_resumes_creates_its_first_pods_again(api: Api) -> None:
    _, pods = await _gang(api, replaces=True, nodeName=NODE)
    await api.send("PATCH", JOBS, "gang", {"spec": {"suspend": True}})
    for pod in pods:
        name = pod["metadata"]["name"]
        await api.until(PODS, name, lambda pod: pod["metadata"].get("deletionTimestamp"))
        await _fails(api, pod)
        await api.send("DELETE", PODS, name, {"gracePeriodSeconds": 0})

    async def none() -> bool:
        return not (await api.send("GET", PODS, labelSelector="g=1"))["items"]

    await eventually(none)
    await api.send("PATCH", JOBS, "gang", {"spec": {"suspend": False}})
    for index in (0, 1):
        new = await _next_pod(api, index)
        assert new["metadata"]["annotations"][FAILURE_COUNT] == "0"


async def pods_of_a_deleted_job_are_not_kept(api: Api) -> None:
    _, pods = await _gang(api, replaces=True, nodeName=NODE)
    await _fails(api, pods[1])
    await api.send("DELETE", JOBS, "gang", {"propagationPolicy": "Background"})
    await api.until(
        PODS, pods[0]["metadata"]["name"], lambda pod: pod["metadata"].get("deletionTimestamp")
    )
    await api.send("DELETE", PODS, pods[0]["metadata"]["name"], {"gracePeriodSeconds": 0})

    async def none() -> bool:
        return not (await api.send("GET", PODS, labelSelector="g=1"))["items"]

    await eventually(none)


async def a_job_fails_once_its_limit_is_below_its_failures(api: Api) -> None:
    _, (first, lost) = await _gang(api, replaces=True, nodeName=NODE)
    await _loses(api, lost)
    await api.send("PATCH", JOBS, "gang", {"spec": {"backoffLimit": 0}})
    name = first["metadata"]["name"]
    await api.until(PODS, name, lambda pod: pod["metadata"].get("deletionTimestamp"))
    assert not _has_condition("Failed")(await api.send("GET", JOBS, "gang"))
    await _fails(api, first)
    failed = await api.until(JOBS, "gang", _has_condition("Failed"))
    assert failed["status"]["failed"] == 2
    await api.send("DELETE", PODS, name, {"gracePeriodSeconds": 0})

    async def only_the_lost_one() -> bool:
        left = (await api.send("GET", PODS, labelSelector="g=1"))["items"]
        return [pod["metadata"]["uid"] for pod in left] == [lost["metadata"]["uid"]]

    await eventually(only_the_lost_one)
    kept = await api.send("GET", PODS, lost["metadata"]["name"])
    assert not kept["metadata"].get("finalizers")


async def a_limit_of_zero_alone_does_not_end_a_job(api: Api) -> None:
    _, (_, lost) = await _gang(api, replaces=True, nodeName=NODE)
    await api.send("PATCH", JOBS, "gang", {"spec": {"backoffLimit": 0}})
    await api.until(JOBS, "gang", lambda job: job["status"].get("active") == 2)
    await _fails(api, lost)
    other = (await _next_pod(api, 0))["metadata"]["name"]
    await api.until(PODS, other, lambda pod: pod["metadata"].get("deletionTimestamp"))


async def a_pod_without_a_node_that_is_kept_fails_once_it_is_deleted(api: Api) -> None:
    _, pods = await _gang(api, replaces=True)
    name = pods[1]["metadata"]["name"]
    await api.send("DELETE", PODS, name, {})
    await api.until(PODS, name, lambda pod: pod["status"]["phase"] == "Failed")


CHECKS_OF_JOBS: tuple[Callable[[Api], Awaitable[None]], ...] = (
    a_job_creates_a_pod_for_each_index_and_completes_with_all,
    a_job_fails_with_the_first_failure_and_deletes_the_others,
    a_job_has_not_failed_before_its_pods_have_ended,
    a_job_with_a_limit_for_each_index_replaces_a_pod_alone,
    each_replacement_of_an_index_doubles_the_delay,
    a_pod_that_terminates_is_not_replaced_before_it_has_failed,
    a_job_that_resumes_creates_its_first_pods_again,
    pods_of_a_deleted_job_are_not_kept,
    a_job_fails_once_its_limit_is_below_its_failures,
    a_limit_of_zero_alone_does_not_end_a_job,
    a_pod_without_a_node_that_is_kept_fails_once_it_is_deleted,
)
