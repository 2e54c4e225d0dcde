"""Edits reach a launcher from the serve pod of its workspace, or from another one."""

import os
import signal
import stat
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from torchrun_api.contract.contents import Manifest
from torchrun_runtime.launch import served
from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.served import ServedWorkspace, Server
from unit.runtime.launching import Launched, Launcher
from unit.runtime.serving import publish, running, token

WAITS = """
    import os, time
    from package.helper import NAME
    held = sorted(name for name in os.listdir("package") if name != "__pycache__")
    print(NAME, os.environ.get("MASTER_PORT"), held, flush=True)
    while True: time.sleep(60)
"""


def program(name: str, *more: str) -> dict[str, bytes]:
    files = {"train.py": textwrap.dedent(WAITS).encode(), "package/helper.py": b""}
    files["package/helper.py"] = f"NAME = {name!r}".encode()
    return files | {f"package/{extra}": b"" for extra in more}


class Cluster:
    """Serve pods, each with its own storage, and the annotations of a worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.podinfo = directory / "annotations"
        self.urls: list[str] = []
        self._stack = ExitStack()
        (directory / "token").write_text(token())

    def serve(self, files: dict[str, bytes], *empty: str, mode: str = "") -> Manifest:
        """Start another serve pod. empty: empty directories."""
        claim = self.directory / f"claim-{len(self.urls)}"
        manifest = publish(claim, files, *empty, mode=mode)
        self.urls.append(self._stack.enter_context(running(claim)))
        return manifest

    def annotate(self, revision: int, manifest: Manifest, pod: int = -1) -> None:
        annotations = {"start": "0", "revision": str(revision)}
        annotations["served"] = f"{self.urls[pod]} {manifest.sha256}"
        temporary = self.podinfo.with_suffix(".new")
        temporary.write_text("".join(f'torchrun.ai/{k}="{v}"\n' for k, v in annotations.items()))
        temporary.rename(self.podinfo)

    def served(self, manifest: Manifest, seconds: float = 120) -> ServedWorkspace:
        first = Server(self.urls[0], str(self.directory / "token"), manifest.sha256)
        return ServedWorkspace(first, str(self.podinfo), str(self.directory / "app"), seconds)

    def files(self) -> dict[str, bytes]:
        app = self.directory / "app"
        return {str(p.relative_to(app)): p.read_bytes() for p in app.rglob("*") if p.is_file()}

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def start(launcher: Launcher, cluster: Cluster, manifest: Manifest, nodes: int = 1) -> Launched:
    cluster.annotate(1, manifest)
    return launcher.start(
        [launcher.python, "train.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_ATTEMPT="0",
        TORCHRUN_WORKSPACE_SOURCE=str(cluster.directory),
        TORCHRUN_WORKSPACE_TARGET=str(cluster.directory / "app"),
        TORCHRUN_WORKSPACE_URL=cluster.urls[0],
        TORCHRUN_WORKSPACE_MANIFEST=manifest.sha256,
        TORCHRUN_START_FILE=str(cluster.podinfo),
        PET_NNODES=str(nodes),
        PET_MASTER_PORT="29500",
        MASTER_PORT="29500",
    )


@pytest.mark.long
def test_a_running_process_gets_newer_code_from_another_pod(
    launcher: Launcher, cluster: Cluster
) -> None:
    launched = start(launcher, cluster, cluster.serve(program("one", "old.py")))
    assert launched.line() == "one 29500 ['helper.py', 'old.py']"
    (cluster.directory / "app" / "package" / "own.txt").write_text("of the run itself")
    cluster.annotate(2, cluster.serve(program("two")))
    assert launched.line() == "two 29501 ['helper.py', 'own.txt']"
    cluster.annotate(3, publish(cluster.directory / "claim-1", program("six")))
    assert launched.line().startswith("six 29502")
    launched.stop()
    assert launched.end().exit_code == 143


@pytest.mark.long
def test_the_same_content_from_another_pod_restarts_nothing(
    launcher: Launcher, cluster: Cluster
) -> None:
    launched = start(launcher, cluster, cluster.serve(program("one")))
    assert launched.line().startswith("one 29500")
    cluster.annotate(2, cluster.serve(program("one")))
    cluster.annotate(3, cluster.serve(program("two")))
    assert launched.line().startswith("two 29501")
    launched.stop()
    assert "revision 2" not in launched.end().err


@pytest.mark.long
def test_a_failed_command_does_not_wait_for_newer_code(
    launcher: Launcher, cluster: Cluster
) -> None:
    launched = start(launcher, cluster, cluster.serve(program("one")))
    assert launched.line().startswith("one")
    kill_rank(launched)
    assert launched.end().exit_code == 128 + signal.SIGKILL


def kill_rank(launched: Launched) -> None:
    task = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}")
    os.kill(int((task / "children").read_text().split()[0]), signal.SIGKILL)
    assert launched.process.stderr
    for line in launched.process.stderr:
        if "failed with" in line:
            break


def test_a_deleted_serve_pod_is_replaced_by_the_next(cluster: Cluster) -> None:
    first = cluster.serve({"a": b"1"})
    cluster.urls[0] = "http://127.0.0.1:1"
    second = cluster.serve({"b": b"2"})
    served = cluster.served(first)
    cluster.annotate(2, second)
    served.update(2)
    assert (cluster.files(), served.revision) == ({"b": b"2"}, 2)


def test_without_an_annotation_the_copy_has_no_number(cluster: Cluster) -> None:
    served = cluster.served(cluster.serve({"a": b"1"}))
    assert served.newest_revision() == 0
    served.update()
    assert (cluster.files(), served.revision) == ({"a": b"1"}, 0)


def test_a_serve_pod_with_another_digest_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrun_runtime.launch.served._ANNOTATION_SECONDS", 0.2)
    cluster.serve({"a": b"1"})
    other = publish(cluster.directory / "elsewhere", {"a": b"2"})
    with pytest.raises(LaunchError, match="has the workspace with manifest"):
        cluster.served(other).update()
    assert not (cluster.directory / "app").exists()


@pytest.mark.parametrize("harm", ["other content", "gone"])
def test_a_serve_pod_that_is_replaced_while_it_fails_is_no_failure(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    cluster.serve({"a": b"1"})
    unknown = publish(cluster.directory / "elsewhere", {"a": b"2"})
    second = cluster.serve({"b": b"2"})
    if harm == "gone":
        cluster.urls[0] = "http://127.0.0.1:1"
    fetched: list[str] = []
    real = served.fetch

    def fetch(server: Server, *more: Any) -> None:
        fetched.append(server.url)
        cluster.annotate(2, second)
        real(server, *more)

    monkeypatch.setattr(served, "fetch", fetch)
    copy = cluster.served(unknown)
    copy.update()
    assert (cluster.files(), copy.revision) == ({"b": b"2"}, 2)
    assert fetched == cluster.urls


def test_partial_downloads_are_removed(cluster: Cluster) -> None:
    served = cluster.served(cluster.serve({"a": b"1", "gone/b": b"2"}))
    served.update(1)
    cluster.annotate(2, cluster.serve({"a": b"2"}))
    served.update(2)
    assert cluster.files() == {"a": b"2"}
    assert not (cluster.directory / "app" / "gone").exists()


def test_a_file_of_the_run_stays_where_an_older_workspace_had_one(cluster: Cluster) -> None:
    served = cluster.served(cluster.serve({"a": b"1", "b": b"1"}))
    served.update(1)
    cluster.annotate(2, cluster.serve({"a": b"2"}))
    served.update(2)
    (cluster.directory / "app" / "b").write_bytes(b"of the run")
    cluster.annotate(3, cluster.serve({"a": b"3"}))
    served.update(3)
    assert cluster.files() == {"a": b"3", "b": b"of the run"}


def test_a_file_and_a_directory_may_take_the_place_of_each_other(cluster: Cluster) -> None:
    programs = ({"x": b"1"}, {"x/y": b"2", "x/z/w": b"3"}, {"x": b"4"})
    served = cluster.served(cluster.serve(programs[0]))
    served.update(1)
    for revision, files in enumerate(programs[1:], start=2):
        cluster.annotate(revision, cluster.serve(files))
        served.update(revision)
        assert cluster.files() == files


def test_a_file_and_an_empty_directory_may_take_the_place_of_each_other(cluster: Cluster) -> None:
    served = cluster.served(cluster.serve({"a": b"1", "x": b"1"}))
    served.update(1)
    cluster.annotate(2, cluster.serve({"a": b"1"}, "x"))
    served.update(2)
    assert (cluster.directory / "app" / "x").is_dir()
    cluster.annotate(3, cluster.serve({"a": b"1", "x": b"2"}))
    served.update(3)
    assert cluster.files() == {"a": b"1", "x": b"2"}


def test_a_change_of_the_mode_alone_is_delivered(cluster: Cluster) -> None:
    files = {"run": b"#!/bin/sh", "same": b"1"}
    served = cluster.served(cluster.serve(files, mode="644"))
    served.update(1)
    file = cluster.directory / "app" / "run"
    before = file.stat()
    assert stat.S_IMODE(before.st_mode) == 0o644
    for revision, mode in enumerate(("755", "644"), start=2):
        cluster.annotate(revision, cluster.serve(files, mode=mode))
        served.update(revision)
        assert stat.S_IMODE(file.stat().st_mode) == int(mode, 8)
    assert file.stat().st_ino == before.st_ino, "its content is not fetched again"


def test_the_same_content_is_accepted_under_its_new_number(cluster: Cluster) -> None:
    first = cluster.serve({"a": b"1"})
    served = cluster.served(first)
    served.update(1)
    cluster.annotate(2, cluster.serve({"a": b"1"}))
    assert served.accept_unchanged(2) is True
    assert served.revision == 2


def test_the_order_of_the_leader_may_be_ahead_of_the_annotation(cluster: Cluster) -> None:
    first = cluster.serve({"a": b"1"})
    served = cluster.served(first)
    served.update(1)
    cluster.annotate(1, first)
    second = cluster.serve({"a": b"2"})
    address = f"{cluster.urls[-1]} {second.sha256}"
    assert not served.accept_unchanged(2, address)
    served.update(2, address)
    assert (cluster.files(), served.revision) == ({"a": b"2"}, 2)
    cluster.annotate(3, cluster.serve({"a": b"3"}))
    served.update(3)
    assert cluster.files() == {"a": b"3"}
