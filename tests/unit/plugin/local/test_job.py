"""The job of a run on this machine, from flags or a file."""

from datetime import UTC, datetime

import pytest

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.local import job as jobs
from kubectl_torchrun.local.job import job_and_queue
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_controller.reconcile.spec.resolve import resolve

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def of_file(gpus: int | None = None, **spec: object) -> tuple[TorchrunJob, int, list[str]]:
    """The job, its ranks on each node, and the fields that are not used."""
    body: JsonObject = {"jobQueue": "h100", "command": "python train.py", **spec}  # type: ignore[dict-item]
    manifest: JsonObject = {"metadata": {"name": "t"}, "spec": body}
    job, queue, ignored = job_and_queue(Request("t", "", "", manifest=manifest), gpus, NOW)
    return job, resolve(job, queue).nproc_per_node, ignored


@pytest.mark.parametrize(
    ("spec", "gpus", "nodes", "ranks"),
    [
        ({"numNodes": 2}, None, 2, 1),
        ({"numNodes": 2}, 4, 2, 4),
        ({"numGPUs": 8}, None, 1, 8),
        ({"numGPUs": 8}, 4, 2, 4),
        ({"numNodes": 2, "distributed": {"nprocPerNode": 3}}, None, 2, 3),
        ({"numNodes": 1, "nodeResources": {"gpus": 2}}, None, 1, 2),
    ],
)
def test_nodes_and_ranks(spec: dict[str, object], gpus: int | None, nodes: int, ranks: int) -> None:
    job, nproc, _ = of_file(gpus, **spec)
    assert nproc == ranks
    _, queue, _ = job_and_queue(
        Request("t", "", "", manifest={"metadata": {}, "spec": {"command": "x", **spec}}),  # type: ignore[dict-item]
        gpus,
        NOW,
    )
    assert resolve(job, queue).size.nodes == nodes


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        ({"numNodes": 5000}, None),
        ({"numNodes": 1}, 99999),
        ({"numGPUs": 9000}, 8),
        ({"numNodes": 2, "distributed": {"nprocPerNode": 1000}}, None),
    ],
)
def test_more_ranks_than_a_machine_can_start_are_refused(
    spec: dict[str, object], gpus: int | None
) -> None:
    with pytest.raises(UsageProblem, match=r"has \d+ ranks, but this machine runs at most"):
        of_file(gpus, **spec)


def test_fields_without_a_meaning_here_are_named() -> None:
    _, _, ignored = of_file(
        numNodes=1,
        image="pytorch",
        priority=5,
        scheduling={"nodeSelector": {"a": "b"}},
        volumes={"workspace": {"source": "zip"}, "checkpoints": {"size": "1Gi"}},
    )
    assert ignored == ["spec.priority", "spec.scheduling", "spec.volumes.checkpoints"]


def test_ranks_without_gpus_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "has_gpus", lambda: False)
    assert of_file(2, numNodes=1)[0].spec.distributed.backend == "gloo"
    monkeypatch.setattr(jobs, "has_gpus", lambda: True)
    assert of_file(2, numNodes=1)[0].spec.distributed.backend is None


@pytest.mark.parametrize(
    ("visible", "index", "devices"),
    [(None, 0, [0, 1]), (None, 1, [2, 3]), ("4,5,6,7", 1, [6, 7])],
)
def test_nodes_have_different_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, devices: list[int]
) -> None:
    monkeypatch.setattr(jobs, "has_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [*jobs.devices_of(index, 2)] == devices


def test_a_head_needs_a_cluster() -> None:
    with pytest.raises(UsageProblem, match="needs a cluster"):
        of_file(numNodes=2, head={})


def test_a_value_of_the_wrong_type_is_named() -> None:
    with pytest.raises(UsageProblem, match=r"numNodes"):
        of_file(numNodes="two")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"numNode": 2}, "--filename: spec has no field numNode. Did you mean numNodes?"),
        ({}, "Set exactly one of spec.numNodes and spec.numGPUs."),
        ({"numNodes": 1, "reliability": {"maxRestarts": -1}}, "maxRestarts"),
    ],
)
def test_a_spec_that_could_never_run_is_refused_at_once(
    spec: dict[str, object], problem: str
) -> None:
    with pytest.raises(UsageProblem, match=problem.replace(".", r"\.").replace("?", r"\?")):
        of_file(**spec)
