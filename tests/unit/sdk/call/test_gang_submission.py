"""Submissions that fail or are interrupted, and what remains of them."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import torchrun_sdk as kt
from torchrun_sdk.call import gang
from torchrun_sdk.cluster.kubectl import Kubectl

from .test_gang import asked, user  # noqa: F401  a fixture

pytestmark = pytest.mark.long  # processes


def test_a_failed_submission_leaves_no_objects(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    (cluster / "refuse").write_text("submit:no such queue")
    volume = kt.Volume("shared")
    with pytest.raises(kt.ClusterError, match="no such queue"):
        kt.fn(user.add).to(kt.Compute(volumes=[volume]))(1)
    assert json.loads((cluster / "created").read_text())["metadata"]["name"] == "shared"
    assert "delete torchrunjob" in asked(cluster)


def test_an_upload_that_fails_says_that_its_job_is_deleted(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    (cluster / "job.json").write_text("{}")  # the plugin created it before it failed
    (cluster / "refuse").write_text("submit:To continue the upload, run sync.")
    with pytest.raises(kt.ClusterError, match=r"Job add-\S+ is deleted\. Repeat the call\."):
        kt.fn(user.add).to(kt.Compute())(1)
    assert not (cluster / "job.json").exists()


def test_an_upload_longer_than_the_limit_is_a_launch_timeout(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cluster / "job.json").write_text("{}")
    (cluster / "refuse").write_text("submit:No sync pod was ready within 61 s.")
    clock = iter([0.0, 61.0])
    monkeypatch.setattr(gang, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(kt.LaunchTimeout, match="No sync pod was ready"):
        kt.fn(user.add).to(kt.Compute(launch_timeout=60.5))(1)
    assert "--upload-timeout 61s" in asked(cluster)


def test_another_call_may_create_the_volume(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    (cluster / "refuse").write_text("create:Error from server (AlreadyExists): it exists")
    assert kt.fn(user.add).to(kt.Compute(volumes=[kt.Volume("shared")]))(1) == 2


def test_ctrl_c_during_the_upload_of_an_app_deletes_its_job(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*words: str, stdin: str) -> str:
        (cluster / "job.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Kubectl, "run_plugin", staticmethod(press))
    with pytest.raises(KeyboardInterrupt):
        kt.App("a", "true", directory=cluster).deploy()
    assert not (cluster / "job.json").exists()
    assert "Deleted job a-" in capsys.readouterr().err
    (cluster / "refuse").write_text("delete:no route")
    with pytest.raises(KeyboardInterrupt):
        kt.App("a", "true", directory=cluster).deploy()
    assert "may still exist: error: no route" in capsys.readouterr().err


def test_an_app_creates_the_claims_of_its_volumes(cluster: Path) -> None:
    (cluster / "slow").touch()  # no pod of the job runs
    kt.App("a", "true", volumes=[kt.Volume("shared")], directory=cluster).deploy()
    claim = json.loads((cluster / "created").read_text())
    assert (claim["kind"], claim["metadata"]["name"]) == ("PersistentVolumeClaim", "shared")


def test_a_failed_deletion_does_not_hide_the_first_error(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (cluster / "refuse").write_text("submit:no such queue\ndelete:no route")
    with pytest.raises(kt.ClusterError, match="no such queue"):
        kt.fn(user.add).to(kt.Compute())(1)
    assert "may still exist: error: no route" in capsys.readouterr().err
