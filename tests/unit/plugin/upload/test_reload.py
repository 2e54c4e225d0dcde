"""Edits of a running job, from the command until its workers use the new revision."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from kubectl_torchrun import terminal
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.upload import reload, tree
from kubectl_torchrun.upload.cache import UploadCache
from torchrun_api.json import JsonObject

from ..api_server import refusal
from ..laptop import READY, Laptop, interrupt_at

pytestmark = pytest.mark.long  # processes

TOKEN = "torchrun.ai/upload-token-sha256"
LABELS = {"torchrun-job-name": "run", "app.kubernetes.io/component": "sync"}


def play_controller(laptop: Laptop, tells: bool = True) -> None:
    """A running job with a standby sync pod. The upload becomes revision 1."""
    server = laptop.server
    laptop.job("run", status={"phase": "Running", "conditions": READY})
    state = {"name": "sync", "ready": True, "state": {"running": {}}}

    def stand_by(annotations: JsonObject) -> None:
        server.put(
            "pods",
            "run-sync-1",
            metadata={"labels": LABELS, "annotations": annotations},
            status={"phase": "Running", "containerStatuses": [state]},
        )

    def replace() -> None:
        annotations = server.objects["torchrunjobs", "run"]["metadata"]["annotations"]  # type: ignore[index,call-overload]
        stand_by({TOKEN: annotations[TOKEN]})  # type: ignore[index,call-overload]

    stand_by({TOKEN: "of another machine"})
    server.on_patch = replace

    def see(request: web.Request) -> None:
        job = server.objects["torchrunjobs", "run"]
        annotations = job["metadata"].get("annotations", {})  # type: ignore[union-attr,call-overload]
        revision = annotations.get("torchrun.ai/workspace-revision")  # type: ignore[union-attr]
        if tells and revision and "workspaceRevision" not in str(job["status"]):
            status = {"phase": "Running", "conditions": READY, "workspaceRevision": int(revision)}
            server.put("torchrunjobs", "run", status=status)

    server.hooks.append(see)
    server.on_upload = lambda: server.put(
        "torchrunjobs",
        "run",
        status={"phase": "Running", "conditions": READY, "workspaceRevision": 1},
    )


def test_a_running_job_gets_the_edit(laptop: Laptop) -> None:
    play_controller(laptop)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "Revision 1: 1 file," in result.stderr
    annotations = laptop.server.objects["torchrunjobs", "run"]["metadata"]["annotations"]  # type: ignore[index,call-overload]
    assert annotations["torchrun.ai/workspace-revision"] == "1"  # type: ignore[index,call-overload]
    assert laptop.server.announced
    assert annotations["torchrun.ai/workspace-sha256"] == laptop.server.announced.sha256  # type: ignore[index,call-overload]


def test_unchanged_files_are_not_sent(laptop: Laptop) -> None:
    play_controller(laptop)
    laptop.run("sync", "run")
    laptop.server.uploaded.clear()
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "already has this content" in result.stderr
    assert not laptop.server.uploaded


def test_files_that_were_lost_are_sent_again(laptop: Laptop) -> None:
    play_controller(laptop)
    laptop.run("sync", "run")
    laptop.server.uploaded.clear()
    lost = {"type": "WorkspaceUpToDate", "status": "False", "reason": "WorkspaceLost"}
    status = {"phase": "Running", "conditions": [*READY, lost], "workspaceRevision": 1}
    laptop.server.put("torchrunjobs", "run", status=status)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert laptop.server.uploaded


def test_an_announced_upload_without_files_is_completed(laptop: Laptop) -> None:
    """An earlier command was killed between the announcement and the upload."""
    play_controller(laptop)
    found = tree.scan(Path())
    sha256 = (
        UploadCache(ClusterNamespace(laptop.server.url, "ns"), Path()).digest(found).manifest.sha256
    )
    named = {"annotations": {"torchrun.ai/workspace-sha256": sha256}}
    laptop.server.put("torchrunjobs", "run", metadata=named)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "Revision 1: 1 file," in result.stderr
    assert laptop.server.uploaded


def test_a_job_that_ends_during_the_sync_is_reported(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Failed", "reason": "ExitCode", "message": "m", "conditions": READY}
    laptop.server.on_upload = lambda: laptop.server.put("torchrunjobs", "run", status=ended)
    result = laptop.run("sync", "run")
    assert result.exit_code == 1
    assert "Failed" in result.stderr


def test_the_command_to_upload_again_has_the_directory_and_the_overlay(laptop: Laptop) -> None:
    play_controller(laptop)
    Path("src").mkdir()
    Path("src/train.py").touch()
    interrupt_at(laptop.server, "/proxy/")
    result = laptop.run("sync", "run", "src", "--overlay", ".")
    assert result.exit_code == 130, result.output
    here = Path.cwd()
    assert f"  kubectl torchrun sync run {here}/src --overlay={here} -n ns" in result.stderr


def test_each_edit_is_sent_until_the_job_ends(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Succeeded", "conditions": READY, "workspaceRevision": 1}

    def end(request: web.Request) -> None:
        if request.method == "PATCH" and laptop.server.uploaded:  # while the revision is announced
            laptop.server.put("torchrunjobs", "run", status=ended)

    laptop.server.hooks.append(end)
    result = laptop.run("sync", "run", "--watch")
    assert result.exit_code == 0, result.output
    assert "Watching" in result.stderr
    assert "Revision 1: 1 file," in result.stderr
    spec = laptop.server.objects["torchrunjobs", "run"]["spec"]
    assert spec["development"] is True  # type: ignore[index,call-overload]


def test_the_end_of_the_job_ends_the_watch(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Succeeded", "message": "m", "conditions": READY}
    laptop.server.on_upload = lambda: laptop.server.put("torchrunjobs", "run", status=ended)
    result = laptop.run("sync", "run", "--watch")
    assert result.exit_code == 0, result.output
    assert "Succeeded" in result.stderr


def at_note(
    monkeypatch: pytest.MonkeyPatch, pattern: str, change: Callable[[], object]
) -> list[str]:
    """Call the function at each note that matches. Returns the notes."""
    notes: list[str] = []

    def note(_: Display, text: str) -> None:
        notes.append(text)
        if re.search(pattern, text):
            change()

    monkeypatch.setattr(terminal, "_BAR_SECONDS", 600.0)  # no note about a slow upload
    monkeypatch.setattr(Display, "note", note)
    return notes


def end_at_note(laptop: Laptop, monkeypatch: pytest.MonkeyPatch, pattern: str) -> list[str]:
    """End the job at the first note that matches. Returns the notes."""
    ended = {"phase": "Succeeded", "conditions": READY, "workspaceRevision": 1}
    end = partial(laptop.server.put, "torchrunjobs", "run", status=ended)
    return at_note(monkeypatch, pattern, end)


def delete(laptop: Laptop) -> None:
    """Delete the job, after which the controller does nothing for it."""
    laptop.server.hooks.clear()
    laptop.server.delete("torchrunjobs", "run")


def replace(laptop: Laptop) -> None:
    """Delete the job, and create another one of the same name."""
    delete(laptop)
    running = {"phase": "Running", "conditions": READY}
    laptop.job("run", metadata={"uid": "another"}, status=running)


@pytest.mark.parametrize("change", [delete, replace])
def test_the_deletion_of_the_job_ends_the_watch(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, change: Callable[[Laptop], None]
) -> None:
    play_controller(laptop)
    notes = at_note(monkeypatch, "Revision 1:", partial(change, laptop))
    result = laptop.run("sync", "run", "--watch")
    assert result.exit_code == 1, result.output
    assert "Job run was deleted." in result.stderr
    assert len(notes) == 2


def test_the_deletion_of_the_job_ends_the_wait_for_its_pods(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_controller(laptop, tells=False)
    laptop.server.on_upload = lambda: None
    wait = JobWatch.next_change

    async def next_change(job_watch: JobWatch, seconds: float) -> bool:
        announced = "workspace-revision" in str(laptop.server.objects.get(("torchrunjobs", "run")))
        if announced and seconds == reload._WORKERS_SECONDS:
            delete(laptop)
        return await wait(job_watch, seconds)

    monkeypatch.setattr(JobWatch, "next_change", next_change)
    result = laptop.run("sync", "run")
    assert result.exit_code == 1, result.output
    assert "Job run was deleted." in result.stderr


@pytest.fixture
def behind_pods(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job whose pods do not get the upload."""
    monkeypatch.setattr(reload, "_WORKERS_SECONDS", 0.2)
    play_controller(laptop, tells=False)
    laptop.server.on_upload = lambda: None


@pytest.mark.usefixtures("behind_pods")
def test_pods_that_do_not_get_the_edit_are_reported(laptop: Laptop) -> None:
    result = laptop.run("sync", "run")
    assert result.exit_code == 3, result.output
    assert "Revision 1 is in the workspace, but not all pods got it within 0 s." in result.stderr
    assert "See: kubectl torchrun status run -n ns" in result.stderr
    assert "torchrun sync" not in result.stderr


@pytest.mark.usefixtures("behind_pods")
def test_pods_that_do_not_get_the_edit_do_not_end_the_watch(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = end_at_note(laptop, monkeypatch, "not all pods got it")
    assert laptop.run("sync", "run", "--watch").exit_code == 0
    assert len(notes) == 2


@pytest.mark.parametrize("failing", [2, 3], ids=["the announcement", "the revision"])
def test_a_change_that_fails_does_not_end_the_watch(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    play_controller(laptop)
    notes = end_at_note(laptop, monkeypatch, "Revision 1: |already has")
    changes: list[str] = []

    def fail(request: web.Request) -> web.Response | None:
        if request.method == "PATCH":
            changes.append(request.path)
            if len(changes) == failing:
                return refusal(503, "the server is shutting down")
        return None

    laptop.server.hooks.append(fail)
    assert laptop.run("sync", "run", "--watch").exit_code == 0
    assert "the server is shutting down. The upload is repeated." in notes
    annotations = laptop.server.objects["torchrunjobs", "run"]["metadata"]["annotations"]  # type: ignore[index,call-overload]
    assert annotations["torchrun.ai/workspace-revision"] == "1"  # type: ignore[index,call-overload]


def test_a_problem_that_stays_is_printed_once(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_controller(laptop)
    Path("loop").symlink_to("..")
    scans: list[Path] = []
    scan = tree.scan

    def scan_and_repair(root: Path, overlay: Path | None) -> tree.Tree:
        scans.append(root)
        if len(scans) == 4:
            Path("loop").unlink()
        return scan(root, overlay)

    monkeypatch.setattr(tree, "scan", scan_and_repair)
    notes = end_at_note(laptop, monkeypatch, "Revision 1: ")
    assert laptop.run("sync", "run", "--watch").exit_code == 0
    assert len([note for note in notes if "point outside the directory" in note]) == 1


@pytest.fixture
def fetching(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return partial(play_fetch, laptop, monkeypatch)


def play_fetch(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, *statuses: dict[str, object]
) -> None:
    """A running job with a git source. It has the next status when the command has seen the last."""
    server = laptop.server
    running: dict[str, object] = {"phase": "Running", "workspaceRevision": 1}
    spec = {"volumes": {"workspace": {"source": "git", "url": "https://git.example/a.git"}}}
    laptop.job("run", spec=spec, status={**running, "conditions": READY})
    left = list(statuses)
    wait = JobWatch.next_change

    async def next_change(job_watch: JobWatch, seconds: float) -> bool:
        metadata = server.objects["torchrunjobs", "run"]["metadata"]
        seen = job_watch.job and job_watch.job.metadata.resource_version
        if left and seen == metadata["resourceVersion"]:  # type: ignore[index,call-overload]
            changed = {"conditions": READY, "workspaceCommit": "c0ffee", **left.pop(0)}
            server.put("torchrunjobs", "run", status={**running, **changed})
        return await wait(job_watch, seconds)

    monkeypatch.setattr(JobWatch, "next_change", next_change)


def behind(status: str, reason: str, message: str) -> dict[str, object]:
    condition = {
        "type": "WorkspaceUpToDate",
        "status": status,
        "reason": reason,
        "message": message,
    }
    return {"conditions": [*READY, condition]}


FETCHES = behind("Unknown", "Fetching", "pod run-sync-1 fetches")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"workspaceRevision": 2}, "Job run runs revision 2 (commit c0ffee). Its pods got it in"),
        ({}, "Job run already runs revision 1 (commit c0ffee)"),
    ],
)
def test_the_result_of_a_fetch_is_printed(
    laptop: Laptop, fetching: Callable[..., None], after: dict[str, object], words: str
) -> None:
    fetching(FETCHES, after)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert words in result.stderr


def test_a_new_fetch_error_is_printed_but_not_an_old_one(
    laptop: Laptop, fetching: Callable[..., None]
) -> None:
    before = behind("False", "FetchFailed", "of the last time")
    fetching(before, FETCHES, behind("False", "SourceNotFound", "there is no main"))
    result = laptop.run("sync", "run")
    assert result.exit_code == 3, result.output
    assert "SourceNotFound" in result.stderr
    assert "FetchFailed" not in result.stderr


def test_a_job_that_ends_during_a_fetch_is_reported(
    laptop: Laptop, fetching: Callable[..., None]
) -> None:
    fetching(FETCHES, {"phase": "Succeeded"})
    result = laptop.run("sync", "run")
    assert result.exit_code != 0
    assert "The job is Succeeded. It ended before the fetch." in result.stderr
