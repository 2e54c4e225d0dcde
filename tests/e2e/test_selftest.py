"""`selftest` with real torch: every check passes on CPUs, and the report has no names."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from e2e.manifests import queue
from e2e.space import Space, until
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS

QUEUE = "team-blue-cpus"
STORAGE: JsonObject = {
    "workspace": {"enabled": True, "size": "32Mi"},
    "checkpoints": {"enabled": True, "size": "32Mi"},
}


def names_of(pod: JsonObject) -> set[str]:
    """Names and addresses of a pod."""
    status, spec, metadata = pod["status"], pod["spec"], pod["metadata"]
    assert isinstance(status, dict)
    assert isinstance(spec, dict)
    assert isinstance(metadata, dict)
    found = (metadata["name"], metadata["uid"], spec.get("nodeName"))
    return {str(name) for name in (*found, status.get("podIP"), status.get("hostIP")) if name}


@pytest.mark.long
@pytest.mark.timeout(1500, func_only=True)
def test_every_check_passes_and_nothing_names_the_cluster(space: Space, tmp_path: Path) -> None:
    resources = {"cpus": "250m", "memory": "1500Mi"}
    space.apply(queue(QUEUE, space.cluster.trainer, nodeResources=resources, storage=STORAGE))
    words = ["selftest", "-n", space.name, "--queue", QUEUE, "--output-dir", str(tmp_path)]
    with space.histories(TORCHRUN_JOBS, PODS) as (jobs, pods):
        ended = subprocess.run(
            ["kubectl", "torchrun", *words],
            env=space.cluster.environment,
            capture_output=True,
            text=True,
            timeout=1300,
            check=False,
        )
        print(ended.stderr)
    (path,) = tmp_path.glob("*.json")
    body = json.loads(path.read_text())
    results = {check["name"]: check["result"] for check in body["checks"]}
    passed = dict.fromkeys(("bandwidth", "transport", "kill", "delete", "hang", "stop"), "passed")
    assert results == {**passed, "memory": "skipped"}, ended.stderr
    assert ended.returncode == 0
    assert (body["hardware"]["ranks"], body["hardware"]["gpus"]) == (2, 0)
    assert body["hardware"]["checkpointFiles"] is True
    assert all(body["versions"][name] for name in ("controller", "kubernetes", "torch"))
    seconds = {check["name"]: check["seconds"] for check in body["checks"]}
    assert 0 < seconds["kill"] < seconds["hang"]
    assert len(body["checks"][0]["allReduce"]) > 3

    text = path.read_text() + path.with_suffix(".html").read_text()
    names = {space.name, QUEUE, space.cluster.trainer, space.cluster.controller}
    names |= {str(state["metadata"]["name"]) for state in jobs.states()}
    for pod in pods.states():
        names |= names_of(pod)
    config = space.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout
    names |= set(re.findall(r'"(?:token|server)": "([^"]+)"', config))
    names.discard("node")  # a local cluster's only machine, and a word of the report
    assert len(names) > 20
    assert [name for name in names if name in text] == []
    assert not re.findall(r"\d+\.\d+\.\d+\.\d+", text)
    until(lambda: space.end_state() == [], "no job, pod or PVC is left")
