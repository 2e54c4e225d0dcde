"""Objects that were stored before a CEL rule existed: they can be suspended, and get a status."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.bodies import dry_run, job, patch
from integration.controller_process import eventually
from torchrun_cluster import LocalCluster

CRD = Path(__file__).parents[2] / "manifests/crd/torchrunjobs.torchrun.ai.yaml"

# Each violates one rule of the spec, or of the name.
VIOLATIONS: dict[str, dict[str, Any]] = {
    "both-sizes": {"numGPUs": 8},
    "no-size": {"numNodes": None},
    "elastic-without-nodes": {
        "numNodes": None,
        "numGPUs": 8,
        "elastic": {"minNodes": 1, "maxNodes": 4},
    },
    "outside-of-elastic": {"numNodes": 9, "elastic": {"minNodes": 1, "maxNodes": 4}},
    "elastic-and-static": {
        "elastic": {"minNodes": 1, "maxNodes": 4},
        "distributed": {"rdzvBackend": "static"},
    },
    "head-alone": {"numNodes": 1, "head": {}},
    "head-and-elastic": {"head": {}, "elastic": {"minNodes": 1, "maxNodes": 4}},
    "a" * 60: {},
    "1-starts-with-a-digit": {},
    # Below the spec.
    "reversed-elastic": {"numNodes": 3, "elastic": {"minNodes": 4, "maxNodes": 2}},
    "never-and-restarts": {"reliability": {"restartPolicy": "Never", "maxRestarts": 2}},
}


@pytest.fixture(scope="module")
def stored(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """A control plane with objects from before the rules."""
    before = yaml.safe_load(CRD.read_text())
    _remove_rules(before)
    apply = ("apply", "--server-side", "--force-conflicts", "-f")
    cluster.kubectl(*apply, "-", stdin=json.dumps(before))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{before['metadata']['name']}")
    first = job("first", numGPUs=8)
    eventually("no rule is in effect", lambda: dry_run(cluster, first).returncode == 0)
    for name, spec in VIOLATIONS.items():
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(job(name, **spec)))
    # Not `install_crds`: other modules on this control plane may have called it before.
    cluster.kubectl(*apply, str(CRD))
    new = job("new", numGPUs=8)
    eventually("the rules are in effect", lambda: dry_run(cluster, new).returncode != 0)
    yield cluster
    cluster.kubectl("delete", "torchrunjobs", *VIOLATIONS, "--wait=false")


def _remove_rules(schema: Any) -> None:
    if isinstance(schema, dict):
        schema.pop("x-kubernetes-validations", None)
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, dict | list):
            _remove_rules(value)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_an_object_from_before_a_rule_can_be_suspended_and_reported(
    stored: LocalCluster, name: str
) -> None:
    status = {"status": {"phase": "Running", "reason": "WorkersRunning"}}
    assert _refusal(patch(stored, name, status, "--subresource=status")) == ""
    for suspend in (True, False):
        assert _refusal(patch(stored, name, {"spec": {"suspend": suspend}})) == ""
    assert dry_run(stored, job(f"{name[:59]}x", **VIOLATIONS[name])).returncode != 0
    if name.startswith(("both", "head-alone")):
        fixed = {"spec": {"numGPUs": None, "head": None}}
        assert patch(stored, name, fixed) == ""
        assert patch(stored, name, {"spec": VIOLATIONS[name]}) != "", "a valid object stays valid"


def _refusal(message: str) -> str:
    """The message without warnings: the API server names what it spares."""
    lines = message.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Warning: "))
