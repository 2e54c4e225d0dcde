"""Checks of the simulated Job controller, for conformance.py."""

from collections.abc import Awaitable, Callable

from bodies import Body
from faults.conformance_api import CONTAINER, NODE, Api, eventually
from torchrun_api.kinds.resources import JOBS, PODS
from torchrun_api.names import CONTROLLER_UID_LABEL
from torchrun_controller.reconcile.pods.head_and_workers import TRACKED


async def _gang(api: Api, **spec_of_pods: str) -> tuple[Body, list[Body]]:
    """A Job with two pods, which fails with the first of them."""
    template = {
        "metadata": {"labels": {"g": "1"}},
        "spec": {"containers": [CONTAINER], "restartPolicy": "Never", **spec_of_pods},
    }
    size = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    policy = {"backoffLimit": 0, "podReplacementPolicy": "Failed"}
    spec = {**size, **policy, "template": template}
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


async def a_suspended_job_releases_its_pods_before_it_deletes_them(api: Api) -> None:
    """A pod that somebody else deletes keeps the finalizer, and then counts as failed."""
    _, pods = await _gang(api, nodeName=NODE)
    names = [pod["metadata"]["name"] for pod in pods]
    assert all(TRACKED in pod["metadata"]["finalizers"] for pod in pods)
    await api.send("DELETE", PODS, names[0])
    await api.send("PATCH", JOBS, "gang", {"spec": {"suspend": True}})
    released = await api.until(PODS, names[1], lambda pod: pod["metadata"].get("deletionTimestamp"))
    assert TRACKED not in released["metadata"].get("finalizers", ())
    deleted = await api.send("GET", PODS, names[0])
    assert TRACKED in deleted["metadata"]["finalizers"]


CHECKS_OF_JOBS: tuple[Callable[[Api], Awaitable[None]], ...] = (
    a_job_creates_a_pod_for_each_index_and_completes_with_all,
    a_job_fails_with_the_first_failure_and_deletes_the_others,
    a_job_has_not_failed_before_its_pods_have_ended,
    a_suspended_job_releases_its_pods_before_it_deletes_them,
)
