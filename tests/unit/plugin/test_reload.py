"""Edits into a job that runs, from the command to the word that its workers were told."""

from pathlib import Path

from aiohttp import web

from kubectl_torchrun import tree
from kubectl_torchrun.kubectl import Where
from kubectl_torchrun.remembered import Memory

from .laptop import READY, Laptop

LABELS = {"torchrun-job-name": "run", "app.kubernetes.io/component": "sync"}


def play_controller(laptop: Laptop, tells: bool = True) -> None:
    """A running job with a sync pod that stands by; what is uploaded becomes revision 1."""
    server = laptop.server
    laptop.job("run", status={"phase": "Running", "conditions": READY})
    state = {"name": "sync", "ready": True, "state": {"running": {}}}
    server.put(
        "pods",
        "run-sync-1",
        metadata={"labels": LABELS, "annotations": {}},
        status={"phase": "Running", "containerStatuses": [state]},
    )

    def see(request: web.Request) -> None:
        job = server.objects["torchrunjobs", "run"]
        said = job["metadata"].get("annotations", {})  # type: ignore[union-attr,call-overload]
        revision = said.get("torchrun.ai/workspace-revision")  # type: ignore[union-attr]
        if tells and revision and "workspaceRevision" not in str(job["status"]):
            status = {"phase": "Running", "conditions": READY, "workspaceRevision": int(revision)}
            server.put("torchrunjobs", "run", status=status)

    server.hooks.append(see)
    server.on_upload = lambda: server.put(
        "torchrunjobs",
        "run",
        status={"phase": "Running", "conditions": READY, "workspaceRevision": 1},
    )


def test_a_job_that_runs_gets_the_edit(laptop: Laptop) -> None:
    play_controller(laptop)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "Revision 1: 1 file," in result.stderr
    said = laptop.server.objects["torchrunjobs", "run"]["metadata"]["annotations"]  # type: ignore[index,call-overload]
    assert said["torchrun.ai/workspace-revision"] == "1"  # type: ignore[index,call-overload]
    assert laptop.server.announced
    assert said["torchrun.ai/workspace-sha256"] == laptop.server.announced.sha256  # type: ignore[index,call-overload]


def test_what_it_has_already_is_not_sent(laptop: Laptop) -> None:
    play_controller(laptop)
    laptop.run("sync", "run")
    laptop.server.uploaded.clear()
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "has this content already" in result.stderr
    assert not laptop.server.uploaded


def test_what_was_named_and_never_sent_is_sent(laptop: Laptop) -> None:
    """A command that was cut between the two."""
    play_controller(laptop)
    found = tree.scan(Path())
    sha256 = Memory(Where(laptop.server.url, "ns"), Path()).look(found).manifest.sha256
    named = {"annotations": {"torchrun.ai/workspace-sha256": sha256}}
    laptop.server.put("torchrunjobs", "run", metadata=named)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "Revision 1: 1 file," in result.stderr
    assert laptop.server.uploaded


def test_a_job_that_ends_meanwhile_is_said(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Failed", "reason": "ExitCode", "message": "m", "conditions": READY}
    laptop.server.on_upload = lambda: laptop.server.put("torchrunjobs", "run", status=ended)
    result = laptop.run("sync", "run")
    assert result.exit_code == 1
    assert "Failed" in result.stderr


def test_each_edit_is_sent_until_the_job_ends(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Succeeded", "conditions": READY, "workspaceRevision": 1}

    def end(request: web.Request) -> None:
        if request.method == "PATCH" and laptop.server.uploaded:  # the revision is being named
            laptop.server.put("torchrunjobs", "run", status=ended)

    laptop.server.hooks.append(end)
    result = laptop.run("sync", "run", "--watch")
    assert result.exit_code == 0, result.output
    assert "Watching" in result.stderr
    assert "Revision 1: 1 file," in result.stderr
    spec = laptop.server.objects["torchrunjobs", "run"]["spec"]
    assert spec["development"] is True  # type: ignore[index,call-overload]


def test_a_job_that_ends_ends_the_watch(laptop: Laptop) -> None:
    play_controller(laptop)
    ended = {"phase": "Succeeded", "message": "m", "conditions": READY}
    laptop.server.on_upload = lambda: laptop.server.put("torchrunjobs", "run", status=ended)
    result = laptop.run("sync", "run", "--watch")
    assert result.exit_code == 0, result.output
    assert "Succeeded" in result.stderr
