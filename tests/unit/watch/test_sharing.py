"""Strings and parts that many objects share are stored once, and freed with the last object."""

import gc
import sys
import tracemalloc

import pytest

from frames import frame, pod
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.watch.codec import Codec
from torchrun_controller.watch.events import Upserted
from torchrun_controller.watch.sharing import frees_interned_strings

PODS = Codec(Pod)


def decoded(job: str, commit: str = "c0ffee") -> Pod:
    obj = pod("a", 5, spec={"nodeName": f"node-of-{job}"})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"uid-of-{job}"}
    obj["metadata"] |= {"labels": {"torchrun-job-name": job}, "ownerReferences": [owner]}
    obj["metadata"] |= {"annotations": {"torchrun.ai/commit": commit}}
    event = PODS.frame(frame("ADDED", obj))
    assert isinstance(event, Upserted)
    return event.object


def test_pods_of_a_job_share_strings_if_python_frees_them() -> None:
    first, second = decoded("train"), decoded("train")
    assert first == second
    shares = frees_interned_strings(sys.version_info[:3])
    for one, other in (
        (first.metadata.labels.torchrun_job, second.metadata.labels.torchrun_job),
        (first.spec.node_name, second.spec.node_name),
    ):
        assert (one is other) is shares


def test_pods_of_a_job_in_a_row_share_annotations_and_owners() -> None:
    first, second = decoded("train"), decoded("train")
    assert second.metadata.annotations is first.metadata.annotations
    assert second.metadata.owner_references is first.metadata.owner_references


def test_pods_share_only_equal_parts() -> None:
    first, second = decoded("train"), decoded("train", commit="b0bbed")
    assert (first.metadata.annotations.commit, second.metadata.annotations.commit) == (
        "c0ffee",
        "b0bbed",
    )
    assert second.metadata.owner_references is first.metadata.owner_references


def test_pods_of_a_job_in_a_row_share_their_requests() -> None:
    requests: JsonObject = {"resources": {"requests": {"nvidia.com/gpu": "8"}}}
    spec: JsonObject = {"containers": [{"name": "trainer", **requests}]}
    pods = []
    for name in ("a", "b"):
        event = PODS.frame(frame("ADDED", pod(name, 5, spec={**spec, "nodeName": name})))
        assert isinstance(event, Upserted)
        pods.append(event.object)
    assert pods[0].spec.containers is pods[1].spec.containers
    assert pods[0].spec.containers[0].resources.requests == {"nvidia.com/gpu": "8"}


def job(name: str, image: str = "trainer:1") -> bytes:
    """An event of a job with a podTemplate of 13 KB."""
    env: list[JsonObject] = [{"name": f"V{n}", "value": f"value {n}" * 5} for n in range(200)]
    container: JsonObject = {"name": "trainer", "image": image, "env": [*env]}
    spec: JsonObject = {"jobQueue": "gpu", "numNodes": 2, "command": "python train.py"}
    spec["podTemplate"] = {"spec": {"containers": [container]}}
    metadata: JsonObject = {"name": name, "namespace": "team", "resourceVersion": "5"}
    return frame("ADDED", {"metadata": metadata, "spec": spec})


def test_jobs_of_a_manifest_share_its_template() -> None:
    codec = Codec(TorchrunJob)
    frames = [job(f"sweep-{number}") for number in range(100)]
    kept = [codec.frame(frames[0])]
    tracemalloc.start()
    kept += [codec.frame(line) for line in frames]
    bytes_of_each = tracemalloc.get_traced_memory()[0] / len(frames)
    tracemalloc.stop()
    assert bytes_of_each < 3000 < len(frames[0])


def test_jobs_with_other_templates_share_none() -> None:
    codec = Codec(TorchrunJob)
    events = [codec.frame(job("a")), codec.frame(job("b", image="trainer:2"))]
    images = []
    for event in events:
        assert isinstance(event, Upserted)
        (container,) = event.object.spec.pod_template.spec["containers"]
        images.append(container["image"])
    assert images == ["trainer:1", "trainer:2"]


def test_deleted_pods_leave_no_strings() -> None:
    """In blocks of memory: the table of interned strings is one, however large it is."""
    decoded("warm-up")
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(5000):
        decoded(f"train-{number}")
    gc.collect()
    assert sys.getallocatedblocks() - before < 2500, "a string for every other job that is gone"


@pytest.mark.parametrize(
    ("version", "freed"),
    [
        ((3, 11, 13), True),
        ((3, 12, 0), False),
        ((3, 12, 6), False),
        ((3, 12, 7), True),
        ((3, 13, 0), True),
    ],
)
def test_python_versions_that_free_interned_strings(
    version: tuple[int, int, int], freed: bool
) -> None:
    assert frees_interned_strings(version) is freed
