"""torchrun-sync as a process: killed at any moment, stopped, restarted, out of space."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from torchrun_api.contract.contents import Entry, Manifest, pack
from unit.runtime.launching import unread_pipe
from unit.runtime.syncing import (
    Client,
    Process,
    archive,
    digest,
    needs_mount,
    on_small_disk,
    process,
    small_disk,
)

pytestmark = pytest.mark.long  # processes

MANY = archive({f"pkg/{n // 100}/{n}.bin": random.Random(n).randbytes(3000) for n in range(1500)})
SMALL = archive({"train.py": b"print()"})
NEWER = archive({"newer.py": b""})
LISTED = Manifest([Entry("train.py", digest(b"print()"), 7, "644")])
FILES = {
    "sha256": digest(SMALL),
    "files": 1,
    "bytes": 7,
    "revision": 1,
    "manifest": LISTED.sha256,
}


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    directory = tmp_path / "claim"
    directory.mkdir()
    return directory


def listening(running: Process) -> Process:
    running.port = int(str(running.event("listening")["port"]))
    return running


def test_success_in_exit_code_message_and_marker(claim: Path) -> None:
    with process(claim.parent) as started:
        server = listening(started)
        assert server.put(SMALL)[0] == 202
        with suppress(ConnectionError):  # it waits 2 s for a client that reads the result
            server.until("done")
        code, message = server.end()
    assert (code, message) == (0, FILES)
    marker = json.loads((claim / ".sync_success").read_text())
    assert message.items() - {("manifest", LISTED.sha256)} <= marker.items()
    assert (claim / "revisions" / "1" / "manifest").read_text() == LISTED.text


def test_any_user_can_write_the_workers_directory(claim: Path) -> None:
    test_success_in_exit_code_message_and_marker(claim)
    state = claim / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o1777
    (state / "kept").touch()
    with process(claim.parent, TORCHRUN_SYNC_SHA256=digest(NEWER)) as again:
        assert listening(again).put(NEWER)[0] == 202
        assert again.end()[0] == 0
    assert (state / "kept").exists()


def test_an_existing_workspace_gets_the_workers_directory(claim: Path) -> None:
    test_success_in_exit_code_message_and_marker(claim)
    (claim / "state").rmdir()
    with process(claim.parent) as again:
        assert again.end()[0] == 0
    assert stat.S_IMODE((claim / "state").stat().st_mode) == 0o1777


@pytest.mark.parametrize("sha256", ["", digest(SMALL)], ids=["any", "this"])
def test_an_existing_workspace_ends_the_pod_at_once(claim: Path, sha256: str) -> None:
    test_success_in_exit_code_message_and_marker(claim)
    (claim / ".incoming").mkdir()
    with process(claim.parent, TORCHRUN_SYNC_SHA256=sha256) as again:
        assert again.end() == (0, FILES)
    assert not (claim / ".incoming").exists()


@pytest.mark.parametrize("sha256", ["", digest(SMALL)], ids=["any", "this"])
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_bytes(b""), lambda path: shutil.rmtree(path.parents[1])],
    ids=["a file", "its content", "all"],
)
def test_a_workspace_that_lacks_files_is_published_again(
    claim: Path, sha256: str, damage: Callable[[Path], None]
) -> None:
    """A pod of an earlier release on a lost machine may have removed them."""
    test_success_in_exit_code_message_and_marker(claim)
    before = {path.name: path.read_bytes() for path in (claim / "revisions/1/tree").iterdir()}
    damage(next(path for path in (claim / "revisions/1/tree").iterdir() if path.read_bytes()))
    with process(claim.parent, TORCHRUN_SYNC_SHA256=sha256) as again:
        assert listening(again).put(SMALL)[0] == 202
        assert again.end() == (0, {**FILES, "revision": 2})
    after = {path.name: path.read_bytes() for path in (claim / "revisions/2/tree").iterdir()}
    assert after == before


def test_another_digest_replaces_the_workspace(claim: Path) -> None:
    test_success_in_exit_code_message_and_marker(claim)
    with process(claim.parent, TORCHRUN_SYNC_SHA256=digest(NEWER)) as again:
        server = listening(again)
        assert server.put(NEWER)[0] == 202
        assert server.end()[0] == 0
    assert [path.name for path in (claim / "revisions/2/tree").iterdir()] == ["newer.py"]
    assert json.loads((claim / ".sync_success").read_text())["sha256"] == digest(NEWER)


@pytest.mark.parametrize("files", [0, 1, 700])
def test_killed_while_extracting_the_next_pod_finishes(claim: Path, files: int) -> None:
    with process(claim.parent) as first:
        assert listening(first).put(MANY)[0] == 202
        first.event("extracting")
        while _extracted(claim) < files and not (claim / ".sync_success").exists():
            pass
        first.kill()
    with process(claim.parent) as second:
        assert second.end()[0] == 0
    assert sum(1 for path in (claim / "revisions/1/tree").rglob("*.bin")) == 1500
    assert {path.name for path in claim.iterdir()} == {"env", "revisions", "state", ".sync_success"}


def _extracted(claim: Path) -> int:
    # os.walk passes over what the process renames meanwhile; Path.glob may raise.
    walks = (os.walk(tree) for tree in claim.glob("tree.new*"))
    return sum(name.endswith(".bin") for walk in walks for _, _, names in walk for name in names)


def test_killed_while_receiving_the_next_pod_resumes(claim: Path) -> None:
    offset = 0
    for cut in (1, 70_000, 500_000):
        with process(claim.parent) as server:
            assert listening(server).get()["offset"] == offset
            connection = server.begin(MANY, offset, cut - offset)
            while server.get()["offset"] != cut:
                pass
            server.kill()
            connection.close()
            offset = cut
    with process(claim.parent) as last:
        assert listening(last).put(MANY, offset)[0] == 202
        assert last.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_promptly_and_keeps_the_upload(claim: Path, number: int) -> None:
    with process(claim.parent) as server:
        connection = listening(server).begin(MANY, 0, 1000)
        while server.get()["offset"] != 1000:
            pass
        server.process.send_signal(number)
        code, message = server.end()
        connection.close()
    assert code == 143
    assert (message["reason"], message["permanent"]) == ("Terminated", False)
    with process(claim.parent) as again:
        assert listening(again).get()["offset"] == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHRUN_SYNC_SOURCE", "ftp"),
        ("TORCHRUN_SYNC_SHA256", "abc"),
        ("TORCHRUN_SYNC_PORT", "http"),
        ("TORCHRUN_SYNC_MAX_ENTRIES", "0"),
    ],
)
def test_a_wrong_setting_is_named(claim: Path, name: str, value: str) -> None:
    with process(claim.parent, **{name: value}) as server:
        code, message = server.end()
    assert (code, message["reason"], message["permanent"]) == (1, "InvalidSetting", True)
    assert name in str(message["message"])
    assert repr(value) in str(message["message"])


def test_a_missing_claim_is_named(tmp_path: Path) -> None:
    with process(tmp_path, TORCHRUN_SYNC_DIR="/proc/none") as server:
        code, message = server.end()
    assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceNotWritable", False)


@pytest.mark.parametrize("is_read", [True, False], ids=["log is read", "log is not read"])
def test_a_bug_is_in_the_termination_message(tmp_path: Path, is_read: bool) -> None:
    program = (
        "import sys, torchrun_runtime.sync.__main__ as sync, torchrun_runtime.sync.fetch as module\n"
        "def fetch(settings): raise KeyError('planted')\n"
        "module.fetch = fetch\n"
        "sys.exit(sync.main([]))\n"
    )
    log = tmp_path / "termination-log"
    log.write_text("")
    environment = {"TORCHRUN_SYNC_SOURCE": "git", "TORCHRUN_TERMINATION_LOG": str(log)}
    with unread_pipe() as unread:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            stdout=subprocess.PIPE if is_read else unread,
            stderr=unread,
        )
    message = json.loads(log.read_text())
    assert (ended.returncode, message["reason"], message["permanent"]) == (1, "SyncFailed", False)
    assert "planted" in message["message"]
    assert not is_read or "Traceback" in json.loads(ended.stdout.splitlines()[0])["traceback"]


@pytest.mark.parametrize(("way", "other"), [("receive", "urllib3"), ("fetch", "aiohttp")])
def test_each_source_imports_only_its_own_libraries(way: str, other: str) -> None:
    """Each of the two libraries takes 0.1 s and some megabytes to import."""
    program = (
        "import sys, torchrun_runtime.sync.__main__\n"
        "assert not {'aiohttp', 'urllib3'} & {*sys.modules}\n"
        f"import torchrun_runtime.sync.{way}\n"
        f"assert {other!r} not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_help_has_the_essentials() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "torchrun_runtime.sync", "--help"], capture_output=True, text=True
    ).stdout
    assert "TORCHRUN_SYNC_SHA256" in text
    assert "PUT /v1/upload" in text


@needs_mount
def test_an_upload_that_fills_the_disk_can_be_tried_again(claim: Path) -> None:
    big = archive({"noise.bin": random.Random(7).randbytes(3 << 20)})
    with process(claim.parent, *on_small_disk(claim.parent, "1m")) as started:
        server = listening(started)
        status, body = server.put(big)
        assert (status, body["reason"]) == (507, "WorkspaceFull")
        assert server.put(SMALL)[0] == 202
        assert server.end()[0] == 0


@needs_mount
def test_a_manifest_that_fills_the_disk(claim: Path) -> None:
    listed = Manifest([Entry(f"{'x' * 100}/{n}", digest(b""), 0, "644") for n in range(20_000)])
    with process(claim.parent, *on_small_disk(claim.parent, "1m")) as started:
        headers: dict[str, object] = {"X-Torchrun-Workspace": listed.sha256}
        server = listening(started)
        status, body = server.request("PUT", "/v1/manifest", pack(listed, None), headers)
        assert (status, body["reason"]) == (507, "WorkspaceFull")
        assert "full. Increase volumes.workspace.size in a new job." in str(body["message"])


@needs_mount
def test_a_disk_that_fills_up_under_an_upload(claim: Path) -> None:
    noise = random.Random(7).randbytes(700_000)
    first, second = archive({"noise.bin": noise}), archive({"noise.bin": noise, "more": b""})
    with process(claim.parent, *on_small_disk(claim.parent, "1m")) as started:
        server = listening(started)
        connection = server.begin(first, 0, 1000)
        while server.get()["offset"] != 1000:
            pass
        filler = Path(f"/proc/{server.process.pid}/root{claim}/filler")
        filler.write_bytes(bytes(600_000))
        connection.send(first[1000:])
        answer = connection.getresponse()
        assert answer.status == 507
        offset = json.loads(answer.read())["offset"]
        assert 1000 <= offset < len(first)
        answer.close()
        connection.close()
        filler.unlink()
        assert Client(server.port).put(second, 0, 100)[0] == 200


# 300 inodes are too few for it, and the sum of its sizes is small.
TINY = archive({f"{number}.py": b"x" for number in range(500)})
FEW_INODES = "size=64m,nr_inodes=300"


@needs_mount
@pytest.mark.parametrize(
    ("data", "options"), [(archive({"zeros.bin": bytes(3 << 20)}), "size=1m"), (TINY, FEW_INODES)]
)
@pytest.mark.parametrize("sha256", ["any", "this"])
def test_a_tree_that_does_not_fit_leaves_room_for_the_next_pod(
    claim: Path, data: bytes, options: str, sha256: str
) -> None:
    """The upload stays for a larger PVC, if the next pod could not accept another one anyway."""
    accepted = {"TORCHRUN_SYNC_SHA256": digest(data)} if sha256 == "this" else {}
    with small_disk(claim.parent, options) as disk:
        with process(claim.parent, *disk.prefix, **accepted) as started:
            server = listening(started)
            assert server.put(data)[0] == 202
            with suppress(ConnectionError):  # it waits 2 s for a client that reads the result
                assert server.until("failed")["reason"] == "WorkspaceFull"
            code, message = server.end()
            assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceFull", False)
        kept = sorted(path.name for path in disk.root.glob("**/*") if path.is_file())
        assert kept == (["archive.zip", "upload.json"] if accepted else [])
        accepted = {"TORCHRUN_SYNC_SHA256": digest(SMALL)} if sha256 == "this" else {}
        with process(claim.parent, *disk.prefix, **accepted) as following:
            assert listening(following).put(SMALL)[0] == 202
            assert following.end() == (0, FILES)
        assert disk.names() == {"env", "revisions", "state", ".sync_success"}


@needs_mount
def test_a_manifest_that_does_not_fit_leaves_room_for_the_next_pod(claim: Path) -> None:
    """All of its files are there, but a link of each needs an inode."""
    many = Manifest([Entry(f"{n}/train.py", digest(b"print()"), 7, "644") for n in range(500)])
    headers: dict[str, object] = {"X-Torchrun-Workspace": many.sha256}
    with small_disk(claim.parent, FEW_INODES) as disk:
        with process(claim.parent, *disk.prefix) as first:
            assert listening(first).put(SMALL)[0] == 202
            assert first.end()[0] == 0
        with process(claim.parent, *disk.prefix, TORCHRUN_SYNC_AFTER="1") as started:
            server = listening(started)
            body = pack(many, None)
            assert server.request("PUT", "/v1/manifest", body, headers)[0] == 202
            with suppress(ConnectionError):  # it waits 2 s for a client that reads the result
                server.until("failed")
            code, message = server.end()
            assert (code, message["reason"]) == (1, "WorkspaceFull")
        with process(claim.parent, *disk.prefix, TORCHRUN_SYNC_AFTER="1") as following:
            assert listening(following).put(NEWER)[0] == 202
            code, message = following.end()
            assert (code, message["revision"]) == (0, 2)


@needs_mount
@pytest.mark.parametrize("left", ["tree.new-lost-1/tree", ".incoming-other", ".incoming"])
def test_what_a_killed_pod_has_left_on_a_full_disk_is_removed(claim: Path, left: str) -> None:
    with small_disk(claim.parent, FEW_INODES) as disk:
        disk.fill(disk.root / left)
        with process(claim.parent, *disk.prefix) as started:
            assert listening(started).put(SMALL)[0] == 202
            assert started.end() == (0, FILES)
        assert disk.names() == {"env", "revisions", "state", ".sync_success"}


@needs_mount
def test_a_disk_that_is_full_of_other_files_is_no_lack_of_rights(claim: Path) -> None:
    with small_disk(claim.parent, FEW_INODES) as disk:
        disk.fill(disk.root / "state")
        with process(claim.parent, *disk.prefix) as started:
            code, message = started.end()
        assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceFull", False)
        assert "volumes.workspace.size" in str(message["message"])
        shutil.rmtree(disk.root / "state")
        with process(claim.parent, *disk.prefix) as following:
            assert listening(following).put(SMALL)[0] == 202
            assert following.end() == (0, FILES)


def test_the_upload_of_another_job_on_a_retained_claim_is_not_the_result(claim: Path) -> None:
    """A token alone accepts any upload, also one that an earlier job of the name has received."""
    with process(claim.parent, TORCHRUN_SYNC_JOB_UID="first") as started:
        assert listening(started).put(SMALL)[0] == 202
        assert started.end()[0] == 0
    with process(claim.parent, TORCHRUN_SYNC_JOB_UID="first") as again:
        assert again.end() == (0, FILES)
    with process(claim.parent, TORCHRUN_SYNC_JOB_UID="second") as other:
        assert listening(other).put(NEWER)[0] == 202
        code, message = other.end()
    assert (code, message["revision"]) == (0, 2)
    assert [path.name for path in (claim / "revisions/2/tree").iterdir()] == ["newer.py"]


def test_the_unfinished_upload_of_another_job_is_dropped(claim: Path) -> None:
    with process(claim.parent, TORCHRUN_SYNC_JOB_UID="first") as started:
        connection = listening(started).begin(MANY, 0, 1000)
        while started.get()["offset"] != 1000:
            pass
        started.kill()
        connection.close()
    for job, offset in (("first", 1000), ("second", 0), ("first", 0)):
        with process(claim.parent, TORCHRUN_SYNC_JOB_UID=job) as again:
            assert listening(again).get()["offset"] == offset


@pytest.mark.parametrize(("after", "revision"), [("1", 2), ("0", 3)])
def test_a_marker_of_a_release_that_recorded_no_job(claim: Path, after: str, revision: int) -> None:
    """It is that of this job only if the job has had a workspace before."""
    for files in (SMALL, archive({"a.py": b""})):
        with process(claim.parent, TORCHRUN_SYNC_SHA256=digest(files)) as started:
            assert listening(started).put(files)[0] == 202
            assert started.end()[0] == 0
    environment = {"TORCHRUN_SYNC_JOB_UID": "first", "TORCHRUN_SYNC_AFTER": after}
    with process(claim.parent, **environment) as again:
        if revision == 3:
            assert listening(again).put(SMALL)[0] == 202
        assert again.end()[1]["revision"] == revision
