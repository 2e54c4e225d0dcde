"""A TorchrunJob from a file of the user, submitted with a directory."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import job_manifest, user_manifest
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api.kinds.job import TorchrunJob

from ..laptop import Laptop, play_controller

JOB = """
apiVersion: torchrun.ai/v1alpha1
kind: TorchrunJob
metadata:
  name: train
  labels: {team: a}
  annotations: {note: mine}
spec:
  jobQueue: q
  numNodes: 3
  command: python train.py
  volumes:
    workspace: {size: 1Gi}
"""


def read(tmp_path: Path, text: str) -> Request:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    body = user_manifest.read(str(file))
    return Request(user_manifest.name_of(body), user_manifest.queue_of(body), "", manifest=body)


def test_fields_of_the_file_stay_and_the_upload_is_named(tmp_path: Path) -> None:
    built = job_manifest.build(read(tmp_path, JOB), "ns", "ab" * 32, "before")
    job = msgspec.convert(built, TorchrunJob)
    assert job.metadata.annotations == {
        "note": "mine",
        "torchrun.ai/workspace-sha256": "ab" * 32,
        "torchrun.ai/workspace-base": "before",
    }
    assert (job.metadata.name, job.metadata.namespace) == ("train", "ns")
    assert (job.spec.num_nodes, job.spec.command) == (3, "python train.py")
    workspace = job.spec.volumes.workspace
    assert workspace is not None
    assert (workspace.source, workspace.size) == ("zip", "1Gi")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "Cannot read --filename .*: line 1, column 5: expected the node content"),
        (f"{JOB}---{JOB}", "has 2 objects"),
        ("", "has 0 objects"),
        ("[]", "is not a TorchrunJob"),
        (JOB.replace("TorchrunJob", "Job"), "is not a TorchrunJob"),
        (JOB.replace("{size: 1Gi}", "{source: git, url: 'https://x/y'}"), "kubectl create -f"),
        ("apiVersion: torchrun.ai/v1alpha1\nkind: TorchrunJob\nspec: []", "spec is not an object"),
        (JOB.replace("mine", "2024-02-30"), "Cannot read --filename"),
        (JOB.replace("mine", "0x_"), "Cannot read --filename"),
        (JOB.replace("mine", "!!int ''"), "Cannot read --filename"),
        (JOB.replace("mine", "!!bool x"), "Cannot read --filename"),
        (JOB.replace("mine", "!!timestamp x"), "Cannot read --filename"),
        (JOB.replace("{note: mine}", "{null: 1}"), "Cannot read --filename"),
        (JOB.replace("mine", "&a [*a]"), "Cannot read --filename"),
        (JOB.replace("mine", "[" * 5000), "Cannot read --filename"),
    ],
)
def test_a_file_without_a_valid_job_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        read(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused_without_a_number(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "directory")):
        with pytest.raises(UsageProblem) as caught:
            user_manifest.read(str(path))
        assert str(caught.value).endswith(why)
        assert "Errno" not in str(caught.value)


def test_dates_are_text(tmp_path: Path) -> None:
    manifest = read(tmp_path, JOB.replace("mine", "2024-02-28")).manifest
    assert manifest
    assert manifest["metadata"]["annotations"] == {"note": "2024-02-28"}  # type: ignore[index,call-overload]


def test_another_namespace_is_refused(tmp_path: Path) -> None:
    request = read(tmp_path, JOB.replace("  name: train", "  name: train\n  namespace: other"))
    with pytest.raises(UsageProblem, match="Add -n other"):
        job_manifest.build(request, "ns", "0")


@pytest.mark.long
def test_the_job_is_created_with_its_overlay_files(laptop: Laptop, tmp_path: Path) -> None:
    play_controller(laptop.server)
    file = tmp_path / "job.json"
    body = {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "spec": {"numNodes": 1, "command": "x"},
    }
    file.write_text(json.dumps(body))
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "extra.json").write_text("{}")
    result = laptop.run("submit", "-f", str(file), "--name", "run", "--overlay", str(overlay))
    assert result.exit_code == 0
    assert "2 files in" in result.stderr
    assert laptop.server.objects["torchrunjobs", "run"]["spec"]["jobQueue"] == "q"


@pytest.mark.long
def test_the_name_of_the_file_overrides_torchrun_toml(laptop: Laptop, tmp_path: Path) -> None:
    Path("torchrun.toml").write_text('name = "mine"\n')
    file = tmp_path / "job.yaml"
    file.write_text(JOB)

    def name(*flags: str) -> object:
        result = laptop.run("submit", "-f", str(file), "--dry-run=client", *flags)
        assert result.exit_code == 0, result.output
        return yaml.safe_load(result.stdout)["metadata"]["name"]

    assert name() == "train"
    assert name("--name", "other") == "other"
    file.write_text(JOB.replace("  name: train\n", ""))
    assert name() == "mine"


@pytest.mark.parametrize("option", [["x"], ["--nodes", "2"], ["--dev"], ["--env", "A=b"]])
def test_options_that_conflict_with_a_file_are_refused(option: list[str]) -> None:
    result = CliRunner().invoke(cli, ["submit", "-f", "job.yaml", *option])
    assert result.exit_code == 2
    assert "cannot be combined with --filename" in result.stderr


def test_a_generated_name_begins_with_the_prefix() -> None:
    names = {user_manifest.name_of({"metadata": {"generateName": "try-"}}) for _ in range(9)}
    assert len(names) > 1
    assert all(re.fullmatch("try-[a-z0-9]{5}", name) for name in names)
    assert user_manifest.name_of({"metadata": {"name": "a", "generateName": "try-"}}) == "a"
