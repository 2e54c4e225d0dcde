"""The TorchrunJob that `submit` creates."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import job_manifest
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api.kinds.job import TorchrunJob


@given(st.text())
def test_generated_names_are_job_names(directory: str) -> None:
    name = job_manifest.generated_name(directory)
    job_manifest.check_name(name)
    assert re.fullmatch(r".*-[a-z0-9]{5}", name)


def test_generated_names_have_the_name_of_the_directory() -> None:
    assert job_manifest.generated_name("My Project_2").startswith("my-project-2-")
    assert job_manifest.generated_name("2024-Übung").startswith("ubung-")
    assert job_manifest.generated_name("日本").startswith("run-")
    assert job_manifest.generated_name("x") != job_manifest.generated_name("x")


@pytest.mark.parametrize("name", ["a" * 46, "A", "1a", "a-", "a.b", "", "-a", "a_b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageProblem):
        job_manifest.check_name(name)


def test_development_is_set_only_with_the_flag() -> None:
    request = Request("run", "q", "x")
    assert "development" not in job_manifest.build(request, "ns", "ab" * 32)["spec"]  # type: ignore[operator]
    built = job_manifest.build(request._replace(development=True), "ns", "ab" * 32)
    assert msgspec.convert(built, TorchrunJob).spec.development is True


def test_the_manifest_is_a_job_of_the_api() -> None:
    request = Request("run", "q", "python x.py", gpus=4, image="i", env=(("A", "b=c"),))
    built = job_manifest.build(request, "ns", "ab" * 32)
    job = msgspec.convert(built, TorchrunJob)
    assert (job.metadata.name, job.metadata.namespace) == ("run", "ns")
    assert job.metadata.annotations == {"torchrun.ai/workspace-sha256": "ab" * 32}
    assert (job.spec.job_queue, job.spec.num_gpus, job.spec.num_nodes) == ("q", 4, None)
    assert (job.spec.image, job.spec.command) == ("i", "python x.py")
    assert [(variable.name, variable.value) for variable in job.spec.env] == [("A", "b=c")]
    assert job.spec.volumes.workspace is not None
    assert job.spec.volumes.workspace.source == "zip"


def test_one_node_by_default() -> None:
    built = job_manifest.build(Request("run", "q", "x"), "ns", "0")
    assert built["spec"] == {
        "jobQueue": "q",
        "numNodes": 1,
        "command": "x",
        "volumes": {"workspace": {"source": "zip"}},
    }


def test_variables() -> None:
    assert job_manifest.variables(["A=1", "B=x=y", "C=", "A=2"]) == (
        ("A", "2"),
        ("B", "x=y"),
        ("C", ""),
    )
    with pytest.raises(UsageProblem, match=r"'A' is not NAME=VALUE"):
        job_manifest.variables(["A"])
    with pytest.raises(UsageProblem, match=r"'1=2' is not NAME=VALUE"):
        job_manifest.variables(["1=2"])


def test_dependencies() -> None:
    parents = job_manifest.dependencies(["prep", "teacher=Running", "prep=Finished"])
    assert parents == (("prep", "Finished"), ("teacher", "Running"))
    built = job_manifest.build(Request("run", "q", "x", after=parents), "ns", "0")
    followed = msgspec.convert(built, TorchrunJob).spec.depends_on
    assert [(d.name, d.condition) for d in followed] == [
        ("prep", "Finished"),
        ("teacher", "Running"),
    ]


@pytest.mark.parametrize("wrong", ["", "=Running", "Prep", "prep=Failed", "a b"])
def test_other_dependencies_are_refused(wrong: str) -> None:
    with pytest.raises(UsageProblem, match="is not JOB or JOB=CONDITION"):
        job_manifest.dependencies([wrong])


def test_the_conditions_are_those_of_the_api() -> None:
    for condition in job_manifest.CONDITIONS:
        built = job_manifest.build(Request("r", "q", "x", after=(("p", condition),)), "ns", "0")
        msgspec.convert(built, TorchrunJob)
