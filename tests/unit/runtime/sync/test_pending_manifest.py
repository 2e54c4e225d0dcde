"""Uploads with a manifest: only missing files are sent, and every file is verified."""

import os
import random
import shutil
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import examples
from torchrun_api.contract.contents import Entry, Manifest, ManifestError, pack, parse, unpack
from torchrun_runtime.sync.assemble import ranges
from torchrun_runtime.sync.claim import Claim, Marker
from unit.runtime import syncing
from unit.runtime.syncing import Client, Json, archive, digest, pod, process

WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"train.py": b"print('hello')", "pkg/data.bin": WEIGHTS, "pkg/copy.bin": WEIGHTS}


def listed(files: dict[str, bytes], *directories: str) -> Manifest:
    entries = [Entry(path, digest(data), len(data), "644") for path, data in files.items()]
    return Manifest([*entries, *(Entry(path, "", 0, "dir") for path in directories)])


def announce(
    client: Client, manifest: Manifest, base: Manifest | None = None, sha256: str = ""
) -> tuple[int, Json]:
    headers: Json = {"X-Torchrun-Workspace": sha256 or manifest.sha256}
    return client.request("PUT", "/v1/manifest", pack(manifest, base), headers)


def wanted(client: Client, manifest: Manifest) -> list[str]:
    """The paths that the pod requests, after its comparison."""
    state = client.until("waiting", "receiving", "done", "failed")
    found: list[str] = []
    for first, last in state["missing"]:  # type: ignore[attr-defined]
        found += [entry.path for entry in manifest.entries[first : last + 1]]
    return found


def send(client: Client, files: dict[str, bytes], manifest: Manifest) -> tuple[int, Json]:
    data = archive(files)
    headers: Json = {
        "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}",
        "X-Torchrun-Sha256": digest(data),
        "X-Torchrun-Workspace": manifest.sha256,
    }
    return client.request("PUT", "/v1/upload", data, headers)


def held(tree: Path) -> dict[str, bytes]:
    found = (path for path in tree.rglob("*") if path.is_file())
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in found}


def upload(directory: Path, files: dict[str, bytes], **changes: object) -> tuple[Marker, list[str]]:
    """Run one sync pod to its end. Returns the marker and the paths that it requested."""
    manifest = listed(files)
    with pod(syncing.settings(directory, **changes)) as server:
        assert announce(server, manifest)[0] == 202
        missing = wanted(server, manifest)
        if missing:
            assert send(server, {path: files[path] for path in missing}, manifest)[0] == 202
        marker = server.end()
    assert isinstance(marker, Marker), marker
    assert held(Claim(directory).tree(marker.revision)) == files
    return marker, missing


def test_sends_each_content_once(tmp_path: Path) -> None:
    manifest = listed(FILES, "logs/empty")
    with pod(syncing.settings(tmp_path / "claim")) as server:
        assert announce(server, manifest) == (202, {"state": "comparing"})
        assert wanted(server, manifest) == ["pkg/copy.bin", "train.py"]
        sent = {path: FILES[path] for path in ("pkg/copy.bin", "train.py")}
        assert send(server, sent, manifest)[0] == 202
        state = server.until("done")
        assert (state["workspace"], state["revision"], state["missing"]) == (manifest.sha256, 1, [])
        marker = server.end()
    claim = Claim(tmp_path / "claim")
    assert isinstance(marker, Marker)
    assert (marker.sha256, marker.files) == (manifest.sha256, 3)
    assert held(claim.tree(1)) == FILES
    assert (claim.tree(1) / "logs/empty").is_dir()
    assert claim.manifest(marker).text == manifest.text
    assert not claim.incoming.exists()


def test_a_new_revision_shares_what_did_not_change(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "claim")
    upload(claim.directory, FILES)
    edited = {**FILES, "train.py": b"print('edited')", "new.py": b""}
    marker, missing = upload(claim.directory, edited)
    assert (marker.revision, missing) == (2, ["new.py", "train.py"])
    assert (claim.tree(1) / "pkg/data.bin").samefile(claim.tree(2) / "pkg/data.bin")
    assert held(claim.tree(1)) == FILES
    third, missing = upload(claim.directory, FILES)
    assert (third.revision, missing) == (3, ["train.py"])
    with pod(syncing.settings(claim.directory)):
        assert sorted(os.listdir(claim.directory / "revisions")) == ["2", "3"]


def test_the_mode_is_a_part_of_the_content(tmp_path: Path) -> None:
    upload(tmp_path / "claim", {"run.sh": b"true"})
    manifest = Manifest([Entry("run.sh", digest(b"true"), 4, "755")])
    with pod(syncing.settings(tmp_path / "claim")) as server:
        announce(server, manifest)
        assert wanted(server, manifest) == ["run.sh"]


def test_files_of_a_base_are_not_sent(tmp_path: Path) -> None:
    base = Claim(tmp_path / "base")
    upload(base.directory, FILES)
    damaged = base.tree(1) / "train.py"
    damaged.write_bytes(damaged.read_bytes().swapcase())
    (base.tree(1) / "pkg/copy.bin").unlink()
    marker, missing = upload(tmp_path / "claim", FILES, base=base.directory)
    assert (marker.revision, missing) == (1, ["train.py"])
    damaged.unlink()
    shutil.rmtree(base.directory)
    _, missing = upload(tmp_path / "other", FILES, base=base.directory)
    assert missing == ["pkg/copy.bin", "train.py"]


def test_a_diff_against_a_stored_manifest(tmp_path: Path) -> None:
    upload(tmp_path / "base", FILES)
    before = listed(FILES)
    manifest = listed({**FILES, "train.py": b"print('edited')"})
    with pod(syncing.settings(tmp_path / "claim", base=tmp_path / "base")) as server:
        assert server.get()["base"] == before.sha256
        status, body = announce(server, manifest, listed({"other": b""}))
        assert (status, body["reason"]) == (409, "ManifestNeeded")
        assert announce(server, manifest, before)[0] == 202
        assert wanted(server, manifest) == ["train.py"]


@pytest.mark.long
def test_the_next_pod_resumes_an_announced_upload(tmp_path: Path) -> None:
    manifest = listed(FILES)
    (tmp_path / "claim").mkdir()
    data = archive({"train.py": FILES["train.py"], "pkg/copy.bin": WEIGHTS})
    headers: Json = {"X-Torchrun-Sha256": digest(data), "X-Torchrun-Workspace": manifest.sha256}
    with process(tmp_path) as first:
        first.port = int(str(first.event("listening")["port"]))
        announce(first, manifest)
        wanted(first, manifest)
        part: Json = {**headers, "Content-Range": f"bytes 0-999/{len(data)}"}
        assert first.request("PUT", "/v1/upload", data[:1000], part) == (200, {"offset": 1000})
        first.kill()
    with process(tmp_path) as second:
        second.port = int(str(second.event("listening")["port"]))
        assert wanted(second, manifest) == ["pkg/copy.bin", "train.py"]
        assert second.get()["offset"] == 1000
        rest: Json = {**headers, "Content-Range": f"bytes 1000-{len(data) - 1}/{len(data)}"}
        assert second.request("PUT", "/v1/upload", data[1000:], rest)[0] == 202
        assert second.end()[0] == 0
    assert held(Claim(tmp_path / "claim").tree(1)) == FILES


def test_files_outside_the_manifest_are_refused(tmp_path: Path) -> None:
    manifest = listed(FILES)
    with pod(syncing.settings(tmp_path / "claim", sha256=manifest.sha256)) as server:
        status, body = send(server, FILES, manifest)
        assert (status, body["reason"]) == (409, "ManifestNeeded")
        announce(server, manifest)
        missing = wanted(server, manifest)
        for wrong in ({"train.py": b"changed"}, {"extra.py": b""}):
            assert send(server, wrong, manifest)[0] == 202
            state = server.until("failed")
            assert state["reason"] == "WrongArchive"
            assert announce(server, manifest)[0] == 202
            assert wanted(server, manifest) == missing
        assert send(server, {"train.py": FILES["train.py"]}, manifest)[0] == 202
        while wanted(server, manifest) != ["pkg/copy.bin"]:
            pass
        assert send(server, {"pkg/copy.bin": WEIGHTS}, manifest)[0] == 202
        assert isinstance(server.end(), Marker)


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        ("{} 0 644 ../x", "InvalidFile", "component '..'"),
        ("{} 0 644 /x", "InvalidFile", "absolute path"),
        ("{} 0 644 a//b", "InvalidFile", "component ''"),
        ("{} 0 644 a\\b", "InvalidFile", "backslash"),
        ("{} 0 644 fine/below", "InvalidFile", "both a file and a directory"),
        ("- 0 dir fine/", "InvalidFile", "ends in '/'"),
        ("{} 0 644 " + "d/" * 200 + "x", "InvalidFile", "levels deep"),
        ("{} 99999999999999 644 large", "WorkspaceTooLarge", "The limit is"),
        ("{} 0 777 x", "ManifestNeeded", "invalid line"),
        ("{} -1 644 x", "ManifestNeeded", "invalid line"),
        ("nonsense", "ManifestNeeded", "invalid line"),
    ],
)
def test_refuses_invalid_manifests(tmp_path: Path, line: str, reason: str, words: str) -> None:
    lines = [Entry("fine", digest(b""), 0, "644").line, line.format(digest(b"x"))]
    lines.sort(key=lambda line: line.split(" ", 3)[-1].encode())
    text = "".join(f"{line}\n" for line in lines)
    body = zlib.compress("\n".join(["", *(f"+{line}" for line in lines)]).encode())
    headers: Json = {"X-Torchrun-Workspace": digest(text.encode())}
    with pod(syncing.settings(tmp_path / "claim")) as server:
        _, answer = server.request("PUT", "/v1/manifest", body, headers)
        assert answer["reason"] == reason, answer
        assert words in str(answer["message"])
        assert server.get()["state"] == "waiting"


def test_only_the_manifest_of_the_job_is_accepted(tmp_path: Path) -> None:
    with pod(syncing.settings(tmp_path / "claim", sha256="0" * 64)) as server:
        status, body = announce(server, listed(FILES))
        assert (status, body["reason"]) == (422, "WrongArchive")
        status, _ = announce(server, listed(FILES), sha256="0" * 64)
        assert status == 409


def test_an_archive_without_a_manifest_is_accepted(tmp_path: Path) -> None:
    with pod(syncing.settings(tmp_path / "claim")) as server:
        announce(server, listed({"other": b""}))
        wanted(server, listed({"other": b""}))
        assert server.put(archive(FILES))[0] == 202
        marker = server.end()
    assert isinstance(marker, Marker)
    assert Claim(tmp_path / "claim").manifest(marker).text == listed(FILES).text


@pytest.mark.long
def test_waits_for_a_newer_revision(tmp_path: Path) -> None:
    upload(tmp_path / "claim", FILES)
    with process(tmp_path, TORCHRUN_SYNC_AFTER="1") as server:
        server.port = int(str(server.event("listening")["port"]))
        manifest = listed({"train.py": b""})
        announce(server, manifest)
        wanted(server, manifest)
        assert send(server, {"train.py": b""}, manifest)[0] == 202
        assert server.end()[1]["revision"] == 2
    with process(tmp_path, TORCHRUN_SYNC_AFTER="1") as again:
        assert again.end()[1]["revision"] == 2


@pytest.mark.long
def test_revisions_of_a_new_claim_follow_those_of_the_former_one(tmp_path: Path) -> None:
    manifest = listed({"train.py": b""})
    (tmp_path / "claim").mkdir()
    with process(tmp_path, TORCHRUN_SYNC_LAST_REVISION="2") as server:
        server.port = int(str(server.event("listening")["port"]))
        announce(server, manifest)
        wanted(server, manifest)
        assert send(server, {"train.py": b""}, manifest)[0] == 202
        assert server.end()[1]["revision"] == 3
    with process(tmp_path, TORCHRUN_SYNC_LAST_REVISION="3") as again:
        assert again.end()[1]["revision"] == 3, "the last revision is still there"


def test_files_are_copied_where_hard_links_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    upload(tmp_path / "claim", FILES)
    monkeypatch.setattr(os, "link", no_links)
    upload(tmp_path / "claim", {**FILES, "train.py": b"2"})


PATHS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1)
ENTRIES = st.dictionaries(PATHS, st.binary(max_size=3), max_size=8)


@given(ENTRIES, ENTRIES)
@examples(200)
def test_a_manifest_arrives_as_it_was(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    base, manifest = listed(before), listed(after)
    assert unpack(pack(manifest), {}).text == manifest.text
    assert unpack(pack(manifest, base), {base.sha256: base}).sha256 == manifest.sha256
    assert parse(manifest.text).entries == manifest.entries


def packed(*lines: bytes) -> bytes:
    return zlib.compress(b"\n".join(lines))


LINE = b"0" * 64 + b" 0 644 "


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        pack(listed(FILES))[:-5],
        packed(b"", b"+"),
        packed(b"", LINE),
        packed(b"", b"+" + LINE + b"\xff"),
        packed(b"\xff"),
        zlib.compress(b'{"base": "", "drop": [], "add": []}'),
    ],
)
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        unpack(data, {})


BOMBS = {
    "lines": b"\n" * (100 << 20),
    "paths to drop": b"\n-" * (50 << 20),
    "a line": b"x" * (127 << 20),
    "wide characters": b"\n+" + "\U0001f680".encode() * (30 << 20),
    "strings in JSON": b'{"base":"","drop":[],"add":[' + b'"aa",' * (20 << 20),
    "lists in JSON": b"[],\n" * (30 << 20),
    "too much": b"x" * (200 << 20),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_measured_before_objects_are_created(content: bytes) -> None:
    """Of 0.2 MB, which a reader of the job may send; the pod has 1 GiB."""
    data = zlib.compress(content)
    del content
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            unpack(data, {})
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


def test_paths_to_drop_may_be_anything() -> None:
    base = listed(FILES)
    data = packed(base.sha256.encode(), b"-", b"-none", b"-train.py")
    left = {entry.path for entry in unpack(data, {base.sha256: base}).entries}
    assert left == FILES.keys() - {"train.py"}


@given(st.sets(st.integers(0, 50)))
def test_ranges_shorten_lists_of_numbers(numbers: set[int]) -> None:
    found = [n for first, last in ranges(sorted(numbers)) for n in range(first, last + 1)]
    assert found == sorted(numbers)


def test_the_server_answers_during_the_comparison(tmp_path: Path) -> None:
    manifest = listed(FILES)
    with pod(syncing.settings(tmp_path / "claim")) as server:
        asking = threading.Thread(target=lambda: [server.get() for _ in range(50)])
        asking.start()
        announce(server, manifest)
        asking.join()
        assert wanted(server, manifest) == ["pkg/copy.bin", "train.py"]
