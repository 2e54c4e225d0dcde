"""`render`: the objects of a job, before anything is created."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.errors import RunProblem, UsageProblem
from kubectl_torchrun.local.environment import expand
from kubectl_torchrun.local.render import read_documents, render
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.queue import TorchrunQueue

ROOT = Path(__file__).parents[4]
MISSION = ROOT / "tests" / "fixtures" / "mission"
QUEUE: JsonObject = {"metadata": {"name": "q"}, "spec": {"image": "pytorch:1"}}
FILES = [
    *MISSION.glob("job-*.yaml"),
    *(path for path in (ROOT / "examples").glob("*.yaml") if "TorchrunJob" in path.read_text()),
]


def kinds(**spec: object) -> list[str]:
    body = {"metadata": {"name": "t"}, "spec": {"jobQueue": "q", "command": "x", **spec}}
    job = msgspec.convert(body, TorchrunJob)
    queue = msgspec.convert(QUEUE, TorchrunQueue)
    return [str(each["kind"]) for each in render(job, queue, "controller:1")]


@pytest.mark.parametrize(
    ("spec", "created"),
    [
        ({"numNodes": 1}, ["Job"]),
        ({"numNodes": 2}, ["Secret", "Job", "Service"]),
        (
            {"numNodes": 2, "volumes": {"workspace": {}, "checkpoints": {}}},
            ["PersistentVolumeClaim", "Pod", "PersistentVolumeClaim", "Secret", "Job", "Service"],
        ),
        (
            {"numNodes": 1, "volumes": {"workspace": {"delivery": "direct"}}},
            ["PersistentVolumeClaim", "Pod", "Job"],
        ),
        (
            {"numNodes": 1, "volumes": {"workspace": {}}, "requirements": ["einops"]},
            ["PersistentVolumeClaim", "Pod", "Pod", "Job"],
        ),
        ({"numNodes": 1, "dependsOn": [{"name": "other"}], "suspend": True}, ["Job"]),
    ],
)
def test_objects_are_in_the_order_of_their_creation(
    spec: dict[str, object], created: list[str]
) -> None:
    assert kinds(**spec) == created


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_job_of_the_pages_renders(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    queues = {d["metadata"]["name"]: d for d in documents if d["kind"] == "TorchrunQueue"}
    for file in (*MISSION.glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")):
        for each in yaml.safe_load_all(file.read_text()):
            if each["kind"] == "TorchrunQueue":
                queues.setdefault(each["metadata"]["name"], each)
    for document in documents:
        if document["kind"] != "TorchrunJob":
            continue
        job = msgspec.convert(document, TorchrunJob)
        queue = queues.get(job.spec.job_queue, QUEUE)
        rendered = render(job, msgspec.convert(queue, TorchrunQueue), "controller:1")
        assert "Job" in [each["kind"] for each in rendered]


def test_a_job_that_cannot_start_says_why() -> None:
    spec = {"jobQueue": "q", "command": "x", "numNodes": 1, "volumes": {"workspace": {}}}
    job = msgspec.convert({"metadata": {"name": "t"}, "spec": spec}, TorchrunJob)
    body = {**QUEUE, "spec": {"image": "i", "storage": {"workspace": {"enabled": False}}}}
    queue = msgspec.convert(body, TorchrunQueue)
    with pytest.raises(RunProblem, match=r"InvalidSpec: .*workspace"):
        render(job, queue, "controller:1")


def test_files_have_exactly_one_job(tmp_path: Path) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(yaml.safe_dump({"kind": "TorchrunQueue", **QUEUE}))
    with pytest.raises(UsageProblem, match="0 TorchrunJobs"):
        read_documents([str(file)])


def test_it_prints_documents_that_kubectl_can_apply(tmp_path: Path) -> None:
    files = [
        f"--filename={ROOT / 'examples' / name}" for name in ("multi-node.yaml", "queues.yaml")
    ]
    printed = CliRunner().invoke(cli, ["render", *files], catch_exceptions=False)
    assert printed.exit_code == 0
    documents = list(yaml.safe_load_all(printed.stdout))
    assert "Job" in [document["kind"] for document in documents]
    assert all({"apiVersion", "kind", "metadata"} <= d.keys() for d in documents)


def variables(**spec: object) -> dict[str, str]:
    """The environment of the training container, as the kubelet expands it."""
    body = {"metadata": {"name": "t"}, "spec": {"jobQueue": "q", "numNodes": 1, **spec}}
    job = msgspec.convert(body, TorchrunJob)
    rendered = render(job, msgspec.convert(QUEUE, TorchrunQueue), "controller:1")
    (child,) = (each for each in rendered if each["kind"] == "Job")
    known: dict[str, str] = {}
    pod: Any = child["spec"]
    for variable in pod["template"]["spec"]["containers"][0]["env"]:
        known[variable["name"]] = expand(variable.get("value", "a field"), known)
    return known


@pytest.mark.parametrize(
    "command",
    [
        "echo $$ > pid; awk '{print $1}'",
        ["python", "train.py", "a$$b", "$$(hostname)"],
        "x $(date)",
    ],
)
def test_a_command_reaches_the_launcher_unchanged(command: str | list[str]) -> None:
    assert json.loads(variables(command=command)["TORCHRUN_COMMAND"]) == command


def test_variables_may_refer_to_those_of_the_controller_and_of_the_pod_template() -> None:
    own = [
        {"name": "RUN_DIR", "value": "/runs/$(TORCHRUN_JOB_NAME)"},
        {"name": "ADDRESS", "value": "tcp://$(POD_IP)"},
        {"name": "B", "value": "one"},
        {"name": "C", "value": "$(B)-two"},
    ]
    of_template = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "OF_TEMPLATE", "value": "$(TORCHRUN_JOB_NAME)"},
    ]
    template = {"spec": {"containers": [{"name": "trainer", "env": of_template}]}}
    seen = variables(command="x", env=own, podTemplate=template)
    expected = {
        "RUN_DIR": "/runs/t",
        "ADDRESS": "tcp://a field",
        "C": "one-two",
        "OF_TEMPLATE": "t",
    }
    assert expected.items() <= seen.items()
