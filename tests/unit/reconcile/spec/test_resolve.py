"""Sizes: GPUs are spread evenly, or refused with the nearest valid numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import resolve
from torchrun_controller.reconcile.spec.validation import validate
from world import ZIP, make_job, make_queue


@pytest.mark.parametrize(
    ("gpus", "per_node", "nodes", "each"),
    [(4, 8, 1, 4), (12, 8, 2, 6), (32, 8, 4, 8), (16, 8, 2, 8), (1, 8, 1, 1)],
)
def test_gpus_become_the_fewest_even_nodes(gpus, per_node, nodes, each):
    queue = make_queue(nodeResources={"gpus": per_node})
    size = resolve(make_job(numGPUs=gpus), queue).size
    assert (size.nodes, size.gpus_per_node, size.gpus) == (nodes, each, gpus)


@given(st.integers(1, 300), st.integers(1, 16))
def test_a_refusal_names_two_numbers_that_work(gpus, per_node):
    queue = make_queue(nodeResources={"gpus": per_node})
    try:
        validate(make_job(numGPUs=gpus), queue)
    except InvalidSpecError as error:
        below, above = (
            int(word) for word in str(error).split(". Use ")[1].removesuffix(".").split(" or ")
        )
        assert below < gpus < above
        for number in (below, above):
            validate(make_job(numGPUs=number), queue)
    else:
        size = resolve(make_job(numGPUs=gpus), queue).size
        assert size.gpus == gpus
        assert size.gpus_per_node <= per_node


def test_a_part_of_a_node_gets_cpu_and_memory_in_proportion():
    queue = make_queue(nodeResources={"gpus": 8, "cpus": 96, "memory": "512Gi"})
    size = resolve(make_job(numGPUs=4), queue).size
    assert size.requests == {"cpu": "48", "memory": "256Gi", "nvidia.com/gpu": "4"}
    assert "cpu" not in size.limits


@pytest.mark.parametrize(
    ("wanted", "size", "requests"),
    [
        ({}, {"numNodes": 2}, {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": "8"}),
        ({"gpus": 4}, {"numNodes": 2}, {"cpu": "48", "memory": "256Gi", "nvidia.com/gpu": "4"}),
        ({"gpus": 4}, {"numGPUs": 6}, {"cpu": "36", "memory": "192Gi", "nvidia.com/gpu": "3"}),
        (
            {"cpus": 40, "memory": "100Gi"},
            {"numGPUs": 4},
            {"cpu": "40", "memory": "100Gi", "nvidia.com/gpu": "4"},
        ),
        (
            {"gpus": 4, "cpus": 40},
            {"numGPUs": 6},
            {"cpu": "40", "memory": "192Gi", "nvidia.com/gpu": "3"},
        ),
        (
            {"gpus": 1, "cpus": "500m", "memory": "1Gi"},
            {"numNodes": 1},
            {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "1"},
        ),
        ({"gpus": 0, "cpus": 2}, {"numNodes": 1}, {"cpu": "2", "memory": "512Gi"}),
    ],
)
def test_a_job_may_request_less_than_a_node(wanted, size, requests):
    queue = make_queue(nodeResources={"gpus": 8, "cpus": 96, "memory": "512Gi"})
    assert resolve(make_job(nodeResources=wanted, **size), queue).size.requests == requests


def test_a_job_sets_the_node_resources_that_its_queue_omits():
    job = make_job(numNodes=1, nodeResources={"memory": "2Gi"})
    size = resolve(job, make_queue(nodeResources={})).size
    assert (size.requests, size.limits) == ({"memory": "2Gi"}, {"memory": "2Gi"})


def test_gpus_run_a_process_each_on_nccl():
    run = resolve(make_job(numNodes=2), make_queue(nodeResources={"gpus": 8}))
    assert (run.nproc_per_node, run.backend) == (8, "nccl")


@pytest.mark.parametrize(
    ("queue", "job", "expected"),
    [
        (None, None, False),
        ({"enabled": True}, None, True),
        ({"enabled": False}, None, False),
        ({"enabled": True}, {"enabled": False}, False),
        ({"enabled": False}, {"enabled": True}, True),
        (None, {}, True),
    ],
)
def test_checkpoints_of_queue_and_job(queue, job, expected):
    storage = {} if queue is None else {"storage": {"checkpoints": queue}}
    volumes = {} if job is None else {"volumes": {"checkpoints": job}}
    run = resolve(make_job(numNodes=1, **volumes), make_queue(**storage))
    assert (run.checkpoints is not None) is expected


TRAINER = {"spec": {"containers": [{"name": "trainer", "image": "template"}]}}


@pytest.mark.parametrize(
    ("job", "queue", "expected"),
    [
        ({"image": "job"}, {"podTemplate": TRAINER}, "job"),
        ({"podTemplate": TRAINER}, {}, "template"),
        ({"image": "job", "podTemplate": TRAINER}, {}, "job"),
        ({}, {"image": "queue", "podTemplate": TRAINER}, "queue"),
    ],
)
def test_an_image_of_the_job_comes_before_that_of_its_queue(job, queue, expected):
    queue = make_queue(**{"image": "queue", **queue})
    assert resolve(make_job(numNodes=1, **job), queue).image == expected


@pytest.mark.parametrize("source", [{"source": "none"}, {"enabled": False}])
def test_no_workspace_if_it_is_disabled(source):
    job = make_job(numNodes=1, volumes={"workspace": source})
    assert resolve(job, make_queue()).workspace is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"numNodes": 1}, "ReadWriteOnce"),
        ({"numNodes": 2}, "ReadWriteMany"),
        ({"numNodes": 1, "elastic": {"minNodes": 1, "maxNodes": 1}}, "ReadWriteOnce"),
        # A PVC keeps its access mode, so it suits the most nodes that the job may have.
        ({"numNodes": 1, "elastic": {"minNodes": 1, "maxNodes": 8}}, "ReadWriteMany"),
    ],
)
def test_the_default_access_mode_suits_every_size_of_the_job(spec, expected):
    resolved = resolve(
        make_job(volumes=ZIP, **spec), make_queue(storage={"checkpoints": {"size": "1Gi"}})
    )
    assert resolved.workspace.access_mode == expected
    assert resolved.checkpoints.access_mode == expected


def test_the_access_mode_of_the_spec_comes_before_the_default():
    volumes = {
        "workspace": {**ZIP["workspace"], "accessMode": "ReadWriteOnce"},
        "checkpoints": {"accessMode": "ReadWriteOnce"},
    }
    elastic = {"minNodes": 1, "maxNodes": 8}
    resolved = resolve(make_job(volumes=volumes, numNodes=1, elastic=elastic), make_queue())
    assert resolved.workspace.access_mode == resolved.checkpoints.access_mode == "ReadWriteOnce"
