"""The requests that a quota is charged with are those of the pods that run."""

from typing import Any

import pytest

from admitting import running
from torchrun_api.kinds.core import Job
from torchrun_controller.reconcile.spec.requests import (
    GangRequests,
    admission_of,
    requests_of,
    requests_of_pods,
    total_requests,
)
from torchrun_controller.reconcile.spec.size import size_of
from world import World, make_job, make_queue

QUOTA = {"quota": {"nodes": 8}}


def requests(pod: dict[str, Any], **node: Any) -> GangRequests:
    queue = make_queue(nodeResources=node, podTemplate={"spec": pod})
    job = make_job(numNodes=2)
    return requests_of(job, queue, size_of(job.spec, queue.spec))


@pytest.mark.parametrize(
    ("resources", "cpu"),
    [
        ({"limits": {"cpu": "96"}}, 8000),
        ({"requests": {"cpu": "12"}}, 12_000),
        ({"requests": {"cpu": "12"}, "limits": {"cpu": "96"}}, 12_000),
        ({"limits": {"memory": "1Gi"}}, 8000),
        # Kubernetes without the feature PodLevelResources ignores the field.
        ({"requests": {"cpu": "4"}}, 8000),
    ],
)
def test_a_limit_of_the_pod_is_no_request_of_what_containers_request(resources, cpu):
    assert requests({"resources": resources}, cpus="8").pod["cpu"] == cpu


def test_a_limit_of_the_pod_is_the_request_of_what_no_container_requests():
    pod = {"resources": {"limits": {"cpu": "96", "memory": "1Gi"}}, "overhead": {"memory": "1Gi"}}
    assert requests(pod, cpus="8").pod["memory"] == 2 << 30


def test_huge_pages_are_requested_up_to_the_limit_of_the_pod():
    pages = "hugepages-2Mi"
    container = {"name": "trainer", "resources": {"limits": {pages: "4Mi"}}}
    pod = {"containers": [container], "resources": {"limits": {pages: "8Mi"}}}
    assert requests(pod).pod[pages] == 8 << 20


SIDECAR = {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": {"cpu": "10m"}}}


@pytest.mark.parametrize(
    ("node", "pod", "charged"),
    [
        ({"cpus": "50m", "memory": "32Mi"}, {}, {"cpu": "100m", "memory": "64Mi"}),
        ({"cpus": "50m"}, {"initContainers": [SIDECAR]}, {"cpu": "110m"}),
        (
            {"cpus": "50m"},
            {"initContainers": [{"name": "launcher", "resources": {"requests": {"cpu": "70m"}}}]},
            {"cpu": "70m"},
        ),
        ({"cpus": "2", "memory": "1Gi"}, {}, {"cpu": "2", "memory": "1Gi"}),
        ({"gpus": 8}, {}, {"nvidia.com/gpu": 8}),
        ({}, {}, {}),
    ],
)
def test_the_charge_is_what_the_pods_request(node, pod, charged):
    world = running({**QUOTA, "nodeResources": node, "podTemplate": {"spec": pod}})
    assert world.job.status.admission.requests == charged
    (gang,) = (o for o in world.objects.values() if isinstance(o, Job))
    gang_requests = requests_of_pods(1, gang.spec.template.spec, None, "nvidia.com/gpu")
    assert admission_of(gang_requests, "gpu").requests == charged
    assert total_requests(((template_of(world), 1),)) == {
        name: str(amount) for name, amount in charged.items()
    }


def template_of(world: World) -> dict[str, Any]:
    bodies = (apply.body for plan in world.plans for apply in plan.applies)
    (template,) = (body["spec"]["template"] for body in bodies if body["kind"] == "Job")
    return template
