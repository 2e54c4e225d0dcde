"""Mutable and immutable fields of a TorchrunJob in each phase, on a real API server."""

import json
from typing import Any

import pytest

from integration.bodies import STARTED, git, job, patch, workspace
from torchrun_cluster import LocalCluster

FIXED = "immutable once the job has started: submit a new job"
SOURCE_FIXED = "enabled and source are immutable once the job is past Pending: submit a new job"
CODE_FIXED = "{} is immutable once the job is past Syncing: submit a new job"


@pytest.fixture(scope="module")
def started(crds: LocalCluster) -> str:
    """A job with a workspace in a phase after Pending."""
    body = job("started", volumes={"workspace": {"source": "zip"}})
    crds.kubectl("create", "-f", "-", stdin=json.dumps(body))
    assert patch(crds, "started", {"status": STARTED}, "--subresource=status") == ""
    return "started"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "queue": ({"jobQueue": "other"}, f"spec.jobQueue: Invalid value: field is {FIXED}"),
    "command": ({"command": "python other.py"}, f"spec.command is {FIXED}"),
    "command's form": ({"command": ["python", "train.py"]}, f"spec.command is {FIXED}"),
    "nodes": ({"numNodes": 3}, f"spec.numNodes: Invalid value: field is {FIXED}"),
    "nodes to GPUs": (
        {"numNodes": None, "numGPUs": 16},
        f"spec.numGPUs: Invalid value: field is {FIXED}",
    ),
    "elastic added": (
        {"elastic": {"minNodes": 1, "maxNodes": 4}},
        "spec.elastic: Invalid value: cannot be added or removed once the job has started",
    ),
    "source": (
        {"volumes": {"workspace": {"source": "none"}}},
        f"spec.volumes.workspace: Invalid value: {SOURCE_FIXED}",
    ),
    "workspace removed": ({"volumes": None}, SOURCE_FIXED),
    "workspace disabled": (
        {"volumes": {"workspace": {"enabled": False}}},
        SOURCE_FIXED,
    ),
}


CODE: dict[str, object] = {
    "url": "https://git.example/b.git",
    "ref": "other",
    "subPath": "other",
    "secretRef": {"name": "other"},
    "image": "other",
}


@pytest.mark.parametrize("field", [*CODE, "claimName"])
@pytest.mark.parametrize("phase", ["Syncing", "Queued"])
def test_the_workspace_source_can_change_until_workers_use_it(
    crds: LocalCluster, field: str, phase: str
) -> None:
    name = f"code-{phase.lower()}-{field.lower()}"
    claim = field == "claimName"
    body = workspace(source="existing", claimName="c") if claim else git()
    body["metadata"]["name"] = name
    crds.kubectl("create", "-f", "-", stdin=json.dumps(body))
    patch(crds, name, {"status": {"phase": phase}}, "--subresource=status")
    change = {"volumes": {"workspace": {field: CODE.get(field, "other")}}}
    message = patch(crds, name, {"spec": change}, "--dry-run=server")
    if phase == "Syncing":
        assert message == ""
    else:
        assert CODE_FIXED.format(field) in message


# A job that is created suspended, or suspended because its source is wrong, and then corrected.
SUSPENDED: dict[str, dict[str, Any]] = {
    "before-syncing": {},
    "without-a-commit": {"workspaceCommit": ""},
    "synced": {"workspaceCommit": "1" * 40},
    "admitted": {"admission": {"nodes": 2}},
    "with-a-gang": {"workers": STARTED["workers"], "workspaceRevision": 1},
}


@pytest.mark.parametrize("field", [*CODE, "claimName"])
@pytest.mark.parametrize("had", SUSPENDED)
def test_the_workspace_source_of_a_suspended_job_can_change_until_it_is_synced(
    crds: LocalCluster, field: str, had: str
) -> None:
    name = f"paused-{had}-{field.lower()}"
    body = workspace(source="existing", claimName="c") if field == "claimName" else git()
    body["metadata"]["name"] = name
    body["spec"]["suspend"] = True
    crds.kubectl("create", "-f", "-", stdin=json.dumps(body))
    status = {"phase": "Suspended", **SUSPENDED[had]}
    assert patch(crds, name, {"status": status}, "--subresource=status") == ""
    change = {"volumes": {"workspace": {field: CODE.get(field, "other")}}}
    message = patch(crds, name, {"spec": change}, "--dry-run=server")
    source_message = patch(crds, name, {"spec": {"volumes": None}}, "--dry-run=server")
    if had in ("before-syncing", "without-a-commit"):
        assert (message, source_message) == ("", "")
    else:
        assert CODE_FIXED.format(field) in message
        assert SOURCE_FIXED in source_message


@pytest.mark.parametrize("case", CHANGES)
def test_a_started_job_is_immutable(crds: LocalCluster, started: str, case: str) -> None:
    spec, message = CHANGES[case]
    assert message in patch(crds, started, {"spec": spec}, "--dry-run=server")


# A refused object sets a job back to Pending, with these fields in the status.
SET_BACK: dict[str, dict[str, Any]] = {
    "a gang": {"workers": {"pending": 0, "ready": 0, "running": 0, "failed": 0, "succeeded": 0}},
    "an admission": {"admission": {"nodes": 2}},
}


@pytest.mark.parametrize("had", SET_BACK)
@pytest.mark.parametrize("case", CHANGES)
def test_a_job_that_is_pending_again_stays_immutable(
    crds: LocalCluster, case: str, had: str
) -> None:
    name = f"again-{had.split()[1]}"
    body = job(name, volumes={"workspace": {"source": "zip"}})
    crds.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    status = {"phase": "Pending", "reason": "Rejected", **SET_BACK[had]}
    patch(crds, name, {"status": status}, "--subresource=status")
    spec, message = CHANGES[case]
    assert message in patch(crds, name, {"spec": spec}, "--dry-run=server")


@pytest.mark.parametrize("had", [{}, {"admission": {"nominated": True}}])
@pytest.mark.parametrize("case", ["queue", "command", "nodes", "nodes to GPUs", "elastic added"])
def test_a_job_that_waits_for_admission_may_change(
    crds: LocalCluster, case: str, had: dict[str, Any]
) -> None:
    name = "waits-" + ("nominated" if had else "behind")
    crds.kubectl("apply", "-f", "-", stdin=json.dumps(job(name)))
    patch(crds, name, {"status": {"phase": "Queued", **had}}, "--subresource=status")
    assert patch(crds, name, {"spec": CHANGES[case][0]}, "--dry-run=server") == ""


@pytest.mark.parametrize("case", CHANGES)
def test_a_pending_job_may_change(crds: LocalCluster, case: str) -> None:
    name = "pending"
    body = job(name, volumes={"workspace": {"source": "zip"}})
    crds.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    patch(crds, name, {"status": {"phase": "Pending"}}, "--subresource=status")
    assert patch(crds, name, {"spec": CHANGES[case][0]}, "--dry-run=server") == ""


def test_a_started_job_can_change_fields_of_later_attempts(
    crds: LocalCluster, started: str
) -> None:
    spec = {"image": "other", "env": [{"name": "A", "value": "1"}]}
    assert patch(crds, started, {"spec": spec}, "--dry-run=server") == ""
    assert patch(crds, started, {"metadata": {"labels": {"a": "b"}}}, "--dry-run=server") == ""


def test_a_started_elastic_job_can_change_its_size(crds: LocalCluster) -> None:
    body = job("elastic", elastic={"minNodes": 1, "maxNodes": 4})
    crds.kubectl("create", "-f", "-", stdin=json.dumps(body))
    patch(crds, "elastic", {"status": STARTED}, "--subresource=status")
    resize = {"spec": {"numNodes": 3, "elastic": {"maxNodes": 3}}}
    assert patch(crds, "elastic", resize, "--dry-run=server") == ""
    removed = patch(crds, "elastic", {"spec": {"elastic": None}}, "--dry-run=server")
    assert "cannot be added or removed" in removed


def test_print_columns(crds: LocalCluster, started: str) -> None:
    head, line = crds.kubectl("get", "tj", started).stdout.splitlines()
    assert head.split() == ["NAME", "QUEUE", "NODES", "PHASE", "WORKERS", "REASON", "AGE"]
    assert line.split()[:7] == [started, "q", "2", "Running", "1/2", "ready", "Starting"]
    wide = crds.kubectl("get", "torchrun", "-o", "wide").stdout.splitlines()[0]
    progress = ["STEP", "OF", "LOSS", "SAMPLES/S"]
    assert wide.split() == [*head.split()[:-1], "RESTARTS", "GPUS", *progress, "CHECKPOINT", "AGE"]
    assert f"torchrunjob.torchrun.ai/{started}" in crds.kubectl("get", "all").stdout


def test_scaling_is_bounded_by_elastic(crds: LocalCluster) -> None:
    elastic = job("scaled", elastic={"minNodes": 2, "maxNodes": 3})
    crds.kubectl("create", "-f", "-", stdin=json.dumps(elastic))
    crds.kubectl("scale", "torchrunjob/scaled", "--replicas=3")
    scaled = json.loads(crds.kubectl("get", "torchrunjob", "scaled", "-o", "json").stdout)
    assert scaled["spec"]["numNodes"] == 3
    for size in (0, 1, 4):
        outside = crds.kubectl("scale", "torchrunjob/scaled", f"--replicas={size}", check=False)
        refusal = (
            "should be greater than or equal to 1"
            if size == 0
            else "must be between elastic.minNodes"
        )
        assert refusal in outside.stderr
    crds.kubectl("delete", "torchrunjob", "scaled")


def test_a_started_job_of_fixed_size_does_not_scale(crds: LocalCluster) -> None:
    crds.kubectl("create", "-f", "-", stdin=json.dumps(job("fixed")))
    patch = json.dumps({"status": STARTED})
    crds.kubectl(
        "patch", "torchrunjob", "fixed", "--subresource=status", "--type=merge", "-p", patch
    )
    refused = crds.kubectl("scale", "torchrunjob/fixed", "--replicas=3", check=False)
    assert "only spec.elastic allows resizing" in refused.stderr
    crds.kubectl("delete", "torchrunjob", "fixed")
