"""Ray by the real KubeRay operator: a RayCluster beside the pod of the call, and its end."""

import json
from collections.abc import Iterator

import pytest

from e2e import gpus
from e2e.cluster import Cluster
from e2e.sdk import Laptop, laptop, ray_image  # noqa: F401  fixtures
from e2e.space import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

WORK = """
import os
import helper

def doubled(n):
    return [2 * n, helper.WORD, os.uname().nodename]

def run(n):
    import ray
    ray.init(address="auto")
    far = ray.remote(num_gpus=1)(doubled)
    print("on the head", helper.WORD, flush=True)
    return [os.uname().nodename, ray.get([far.remote(i) for i in range(n)])]
"""
CALL = """
    from pathlib import Path
    import work

    remote = kt.fn(work.run).to(kt.Compute(image="localhost/none:1", {compute})).distribute(
        "ray", workers=1, worker_node_options={{"gpus": 1}}, operator="kuberay"
    )
"""


@pytest.fixture
def kuberay(cluster: Cluster) -> Iterator[None]:
    with gpus.installed(cluster, "kuberay"):
        yield


@pytest.fixture
def user(laptop: Laptop) -> Laptop:  # noqa: F811
    (laptop.directory / "work.py").write_text(WORK)
    (laptop.directory / "helper.py").write_text("WORD = 'before'\n")
    return laptop


def clusters(laptop: Laptop) -> str:  # noqa: F811
    """RayClusters and their pods."""
    get = ("get", "--ignore-not-found", "-o", "name")
    pods = laptop.space.kubectl(*get, "pods", "-l", "torchrun.ai/sdk-ray")
    return pods + laptop.space.kubectl(*get, "rayclusters.ray.io")


def test_results_come_from_a_raycluster_that_is_deleted_afterwards(
    user: Laptop,
    ray_image: str,  # noqa: F811
    kuberay: None,
) -> None:
    user.image = ray_image
    out = user.run(
        CALL.format(compute="idle_time=15")
        + """
    for number in (3, 5):
        begun = time.time()
        head, results = remote(number)
        assert [double for double, _, _ in results] == [2 * i for i in range(number)], results
        print("RETURNED", {word for _, word, _ in results}, f"in {time.time() - begun:.1f} s")
        assert {place for _, _, place in results} != {head}, "tasks ran on a worker"
        Path("helper.py").write_text("WORD = 'after'\\n")
    """
    )
    assert "RETURNED {'before'} in" in out
    assert "RETURNED {'after'} in" in out
    (job,) = user.jobs()
    name = job["metadata"]["name"]
    assert job["spec"]["numNodes"] == 1
    listed = json.loads(user.space.kubectl("get", "rayjobs.ray.io", name, "-o", "json"))
    assert listed["status"]["jobDeploymentStatus"] == "Running"
    # At the end of the job, long before the job is deleted.
    user.space.wait_phase(name, "Succeeded")
    until(lambda: not clusters(user), "the RayCluster's end", 120)
    assert len(user.jobs()) == 1


def test_a_cluster_that_cannot_start_is_reported_and_deleted(user: Laptop, kuberay: None) -> None:
    user.image = "localhost/none:1"
    out = user.run(
        CALL.format(compute="launch_timeout=30")
        + """
    try:
        remote(1)
    except kt.LaunchTimeout as error:
        print("CAUGHT", error)
    """
    )
    assert "CAUGHT Job run-" in out
    assert "RayJob is Initializing" in out
    assert "-head-" in out
    assert "Image" in out
    until(lambda: not (user.jobs() or clusters(user)), "all of it is deleted", 60)


def test_nothing_is_created_without_kuberay(user: Laptop) -> None:
    out = user.run(
        CALL.format(compute="")
        + """
    try:
        remote(1)
    except kt.UsageError as error:
        print("CAUGHT", error)
    """
    )
    assert "CAUGHT" in out
    assert "requires KubeRay (ray.io/v1)" in out
    assert not user.jobs()
