"""The CRDs on a real API server: accepted and refused objects, and the messages."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml

from integration.bodies import accepted, git, job, patch, queue, refusal, rule, workspace
from integration.refused import REFUSED
from integration.test_crd_changes import CHANGES, CODE, CODE_FIXED
from torchrun_api.generate.crd import DEFINITIONS
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.status import Phase
from torchrun_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
MISSION = sorted((ROOT / "tests" / "fixtures" / "mission").glob("*.yaml"))
TYPES = {"TorchrunJob": TorchrunJob, "TorchrunQueue": TorchrunQueue}
PHASES = get_args(Phase)
NODE = {
    "gpus": 0,
    "gpuResourceName": "amd.com/gpu",
    "cpus": "1500m",
    "memory": 1024,
    "extra": {"rdma/hca": 1},
}


def test_crds_are_established_with_their_names(crds: LocalCluster) -> None:
    listed = json.loads(crds.kubectl("get", "crd", "-o", "json").stdout)["items"]
    found = {item["metadata"]["name"]: item["status"] for item in listed}
    for definition in DEFINITIONS:
        status = found[definition.kind.resource]
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert conditions["Established"] == "True"
        assert "NonStructuralSchema" not in conditions
        assert status["acceptedNames"]["shortNames"] == list(definition.short_names)


@pytest.mark.parametrize("path", MISSION, ids=lambda path: path.stem)
def test_the_users_documents_apply_unchanged(crds: LocalCluster, path: Path) -> None:
    crds.kubectl("apply", "--validate=strict", "-f", str(path))
    for written in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        kind, name = written["kind"], written["metadata"]["name"]
        stored = crds.kubectl("get", kind, name, "-o", "json").stdout
        read = msgspec.json.decode(stored, type=TYPES[kind])
        assert read.spec == msgspec.convert(written, type=TYPES[kind]).spec
    crds.kubectl("delete", "-f", str(path))


@pytest.mark.parametrize("command", ["python train.py", ["python", "train.py"]])
def test_a_command_is_a_line_or_a_list(crds: LocalCluster, command: str | list[str]) -> None:
    assert accepted(crds, job(command=command))["spec"]["command"] == command


@pytest.mark.parametrize("command", [5, True, {"a": "b"}, ["python", 1], [["python"]]])
def test_other_commands_are_refused(crds: LocalCluster, command: object) -> None:
    assert (
        "spec.command must be a string (a shell line) or a list of strings"
        " (a program and its arguments)"
    ) in refusal(crds, job(command=command))


@pytest.mark.parametrize("command", ["make", ["make", "all"]])
def test_a_setup_command_is_a_line_or_a_list(crds: LocalCluster, command: str | list[str]) -> None:
    stored = accepted(crds, job(setupCommand=command, requirements=["einops", "-r r.txt"]))
    assert stored["spec"]["setupCommand"] == command


@pytest.mark.parametrize("command", [5, {"a": "b"}, ["make", 1]])
def test_other_setup_commands_are_refused(crds: LocalCluster, command: object) -> None:
    assert "spec.setupCommand must be a string (a shell line) or a list of strings" in refusal(
        crds, job(setupCommand=command)
    )


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_objects_are_refused_with_a_message(crds: LocalCluster, case: str) -> None:
    body, message = REFUSED[case]
    assert message in refusal(crds, body)


@pytest.mark.parametrize(
    "body",
    [
        job(name="a" * 45),
        job(numNodes=None, numGPUs=12),
        job(head={"nodeResources": {"gpus": 0}, "podTemplate": {"spec": {"hostname": "a"}}}),
        job(elastic={"minNodes": 2, "maxNodes": 2}),
        job(elastic={"minNodes": 2, "maxNodes": 2}, distributed={"rdzvBackend": "c10d"}),
        job(reliability={"restartPolicy": "Never", "maxRestarts": 0}),
        job(reliability={"restartPolicy": "Never", "rules": [rule("fail", exitCodes=[3])]}),
        job(
            reliability={
                "maxRestarts": 9,
                "rules": [rule("fail", exitCodes=[3, 4]), rule("ignore", exitCodes=[5])],
            }
        ),
        job(podTemplate={"spec": {"containers": [{"name": "trainer", "stdin": True}]}}),
        job(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]),
        git(ref="refs/tags/v1.0", subPath="a/b c", secretRef={"name": "s"}, image="i"),
        git(url="ssh://git@git.example:2222/acme/a.git", ref="feature/a+b#1"),
        git(url="https://[2001:db8::1]:8443/~me/a.git".replace("::", ":0:0:0:0:0:"), ref="0" * 40),
        workspace(source="s3", url="s3://code"),
        workspace(source="s3", url="http://minio.storage:9000/code/a.tar.gz", subPath="a"),
        workspace(source="existing", claimName="c", subPath="a"),
        queue(),
        queue(nodeResources=NODE),
        queue(scheduling={"tolerations": [{"key": "gpu", "operator": "Exists"}]}),
    ],
    ids=lambda body: json.dumps(body["spec"])[:60],
)
def test_valid_objects_are_stored_unchanged(crds: LocalCluster, body: dict[str, Any]) -> None:
    stored = accepted(crds, body)["spec"]
    assert {field: stored[field] for field in body["spec"]} == body["spec"]


def test_defaults_are_filled_in(crds: LocalCluster) -> None:
    stored = accepted(crds, job(volumes={"workspace": {}}))
    assert stored["spec"]["launcher"] == "auto"
    assert stored["spec"]["volumes"]["workspace"] == {"enabled": True, "source": "zip"}
    assert "status" not in stored


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_stored(crds: LocalCluster, phase: str) -> None:
    """The CRD of an earlier controller lacked Queued, so its status was always refused."""
    name = f"is-{phase.lower()}"
    crds.kubectl("create", "-f", "-", stdin=json.dumps(job(name)))
    assert patch(crds, name, {"status": {"phase": phase}}, "--subresource=status") == ""
    stored = crds.kubectl("get", "torchrunjob", name, "-o", "jsonpath={.status.phase}").stdout
    assert stored == phase


def test_every_cel_rule_has_a_refused_case() -> None:
    """The refused cases cover every message of the schemas."""
    fixed = [CODE_FIXED.format(field) for field in (*CODE, "claimName")]
    tried = " ".join([*fixed, *(m for _, m in (*REFUSED.values(), *CHANGES.values()))])
    messages = set()
    for path in (ROOT / "manifests" / "crd").glob("*torchrun.ai.yaml"):
        messages |= set(rule_messages(yaml.safe_load(path.read_text(encoding="utf-8"))))
    assert messages
    untried = {m for m in messages if m.split(" (only")[0].split(": submit")[0] not in tried}
    assert untried == set()


def rule_messages(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [rule["message"] for rule in node.get("x-kubernetes-validations", [])]
        return own + [message for child in node.values() for message in rule_messages(child)]
    if isinstance(node, list):
        return [message for child in node for message in rule_messages(child)]
    return []


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("tj.spec", "Number of nodes. Each node is one pod with the queue's nodeResources."),
        ("trj.spec.command", "A string is a shell command line."),
        ("tj.spec.volumes.workspace.source", "zip: an upload by kubectl torchrun."),
        ("tj.status.lastFailure", "Exit code of that rank."),
        ("trq.spec.nodeResources.memory", 'Memory of each node, for example "512Gi".'),
    ],
)
def test_kubectl_explains(crds: LocalCluster, field: str, words: str) -> None:
    assert words in " ".join(crds.kubectl("explain", field).stdout.split())
