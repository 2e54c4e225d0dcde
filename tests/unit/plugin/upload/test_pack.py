"""A workspace as an archive, and the tree that the sync pod extracts."""

import hashlib
import os
import tempfile
import time
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import pack
from kubectl_torchrun.upload.cache import UploadCache, Workspace
from kubectl_torchrun.upload.pack import UploadLimits
from kubectl_torchrun.upload.tree import scan
from profiles import examples
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.errors import ArchiveError
from torchrun_runtime.sync.settings import ArchiveLimits as SyncLimits

PARTS = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/\\"),
    min_size=1,
    max_size=12,
).filter(lambda part: part not in (".", "..") and len(part.encode()) < 200)


def apart(tree: Iterable[tuple[str, ...]]) -> bool:
    """Whether names differ after case folding and normalisation; others are refused."""
    places = {parts[:depth] for parts in tree for depth in range(1, len(parts) + 1)}
    folded = {unicodedata.normalize("NFC", "/".join(place)).casefold() for place in places}
    return len(folded) == len(places)


TREES = st.dictionaries(
    st.lists(PARTS, min_size=1, max_size=3).map(tuple),
    st.tuples(st.binary(max_size=300), st.booleans()),
    min_size=1,
    max_size=8,
).filter(apart)


def listed(root: Path) -> Workspace:
    return UploadCache(ClusterNamespace("https://cluster.example", "ns"), root).digest(scan(root))


def files(workspace: Workspace) -> list[int]:
    entries = workspace.manifest.entries
    return [number for number, entry in enumerate(entries) if entry.mode != "dir"]


def archive(root: Path, directory: Path) -> tuple[pack.Archive, Path]:
    with tempfile.TemporaryFile() as file:
        workspace = listed(root)
        packed = pack.write(workspace, files(workspace), file)
        file.seek(0)
        path = directory / "archive.zip"
        path.write_bytes(file.read())
    return packed, path


@examples(50)
@given(TREES)
def test_the_sync_pod_extracts_the_same_tree(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[tuple[str, ...], tuple[bytes, bool]]
) -> None:
    base = tmp_path_factory.mktemp("pack")
    root = base / "root"
    root.mkdir()
    expected = {}
    for parts, (content, executable) in tree.items():
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError:  # a file and a directory have the same name
            continue
        path.chmod(0o755 if executable else 0o644)
    for file in scan(root).files:
        expected[file.path] = (file.source.read_bytes(), file.executable)
    if not expected:
        return
    pack.check(scan(root))
    packed, path = archive(root, base)
    assert packed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert packed.size == path.stat().st_size
    extraction = extract(path, base / "out", SyncLimits())
    entries = listed(root).manifest.entries
    assert extraction.entries == tuple(entry for entry in entries if entry.mode != "dir")
    found = {
        str(file.relative_to(base / "out")): (
            file.read_bytes(),
            bool(file.stat().st_mode & 0o100),
        )
        for file in (base / "out").rglob("*")
        if file.is_file()
    }
    assert found == expected


def test_the_digest_depends_on_names_contents_and_modes_only(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root / "sub").mkdir(parents=True)
    for name in ("a.py", "sub/b.py", "z.bin"):
        (tmp_path / "one" / name).write_bytes(name.encode() * 1000)
    for name in ("z.bin", "sub/b.py", "a.py"):
        file = tmp_path / "two" / name
        file.write_bytes(name.encode() * 1000)
        os.utime(file, (0, time.time() - 1e6))
    (tmp_path / "two" / "a.py").chmod(0o600)
    one, _ = archive(tmp_path / "one", tmp_path)
    two, _ = archive(tmp_path / "two", tmp_path)
    assert one.sha256 == two.sha256
    (tmp_path / "two" / "a.py").chmod(0o700)
    assert archive(tmp_path / "two", tmp_path)[0].sha256 != one.sha256


def test_the_digest_of_a_tree_is_stable_over_releases(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/train.py").write_bytes(b"x")
    (tmp_path / "root/empty").mkdir()
    text = f"- 0 dir empty\n{hashlib.sha256(b'x').hexdigest()} 1 644 train.py\n"
    assert listed(tmp_path / "root").manifest.text == text


def test_only_requested_files_are_packed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    workspace = listed(tmp_path)
    with tempfile.TemporaryFile() as file:
        packed = pack.write(workspace, [0, 2], file)
        assert zipfile.ZipFile(file).namelist() == ["a", "c"]
    assert (packed.files, packed.unpacked) == (2, 2)


def test_incompressible_bytes_are_stored(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/weights.bin").write_bytes(os.urandom(200_000))
    (tmp_path / "root/code.py").write_bytes(b"import torch\n" * 1000)
    _, path = archive(tmp_path / "root", tmp_path)
    kinds = {info.filename: info.compress_type for info in zipfile.ZipFile(path).infolist()}
    assert kinds == {"code.py": zipfile.ZIP_DEFLATED, "weights.bin": zipfile.ZIP_STORED}


def test_the_limits_are_those_of_the_sync_pod() -> None:
    ours, theirs = pack.LIMITS, SyncLimits()
    assert (ours.files, ours.size, ours.path, ours.depth, ours.ratio, ours.ratio_floor) == (
        theirs.entries,
        theirs.bytes,
        theirs.path,
        theirs.depth,
        theirs.ratio,
        theirs.ratio_floor,
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (UploadLimits(files=1), r"has 2 files; the limit is 1\.\n  (data|x\.py): 1 files"),
        (UploadLimits(size=100), r"has 3\.0 KiB; the limit is 100 B\.\n  data: 3\.0 KiB"),
        (UploadLimits(path=4), "'data/x' is longer than 4 bytes"),
        (UploadLimits(depth=1), "'data/x' has more than 1 directories"),
    ],
)
def test_a_tree_over_a_limit_is_refused_with_the_reason(
    tmp_path: Path, limits: UploadLimits, message: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(b"x" * 3072)
    (tmp_path / "x.py").write_bytes(b"")
    with pytest.raises(UsageProblem, match=message):
        pack.check(scan(tmp_path), limits)


@pytest.mark.parametrize("name", [b"a\xff", b"a\nb", b"a\\b"])
def test_invalid_names_are_refused(tmp_path: Path, name: bytes) -> None:
    (tmp_path / os.fsdecode(name)).write_bytes(b"")
    with pytest.raises(UsageProblem, match="Rename it"):
        pack.check(scan(tmp_path))


def put(root: Path, path: str) -> None:
    """Create a file, or a directory if the path ends with a slash."""
    place = root / path
    if path.endswith("/"):
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        ("README", "Readme", ("README", "Readme")),
        ("caf\u00e9", "cafe\u0301", ("cafe\u0301", "caf\u00e9")),
        ("stra\u00dfe", "strasse", ("strasse", "stra\u00dfe")),
        ("Data/x", "data/y", ("Data", "data")),
        ("Data", "data/y", ("Data", "data")),
        ("x/Data/", "x/data", ("x/Data", "x/data")),
    ],
)
def test_names_that_differ_only_in_case_or_accents_are_refused(
    tmp_path: Path, one: str, two: str, names: tuple[str, str]
) -> None:
    put(tmp_path / "one", one)
    put(tmp_path / "two", two)
    (tmp_path / "one/z").touch()
    (tmp_path / "two/z").touch()
    pack.check(scan(tmp_path / "one"))
    pack.check(scan(tmp_path / "two"))
    message = f"The paths {names[0]!r} and {names[1]!r} differ only in case or in the encoding"
    with pytest.raises(UsageProblem, match=message):
        pack.check(scan(tmp_path / "one", tmp_path / "two"))


def test_the_sync_pod_refuses_the_same_names(tmp_path: Path) -> None:
    put(tmp_path, "root/README")
    put(tmp_path, "root/Readme")
    if len(scan(tmp_path / "root").files) == 1:
        pytest.skip("this file system ignores case")
    _, path = archive(tmp_path / "root", tmp_path)
    with pytest.raises(ArchiveError, match="differs from 'README' only in case"):
        extract(path, tmp_path / "out", SyncLimits())
    with pytest.raises(UsageProblem, match="'README' and 'Readme'"):
        pack.check(scan(tmp_path / "root"))


def test_an_empty_tree_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.log").touch()
    (tmp_path / ".gitignore").write_text("*\n")
    with pytest.raises(UsageProblem, match="nothing to upload"):
        pack.check(scan(tmp_path))


def test_a_file_that_changes_or_disappears_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("1")
    tree = scan(tmp_path)
    workspace = listed(tmp_path)
    (tmp_path / "x.py").write_text("2")
    changed = pytest.raises(UsageProblem, match=r"x\.py changed during the upload")
    with tempfile.TemporaryFile() as file, changed:
        pack.write(workspace, [0], file)
    (tmp_path / "x.py").unlink()
    with tempfile.TemporaryFile() as file, changed:
        pack.write(workspace, [0], file)
    with pytest.raises(UsageProblem, match=r"x\.py was deleted while being read"):
        UploadCache(ClusterNamespace("https://cluster.example", "ns"), tmp_path).digest(tree)


def test_a_file_that_becomes_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("1")
    tree = scan(tmp_path)
    workspace = listed(tmp_path)
    (tmp_path / "x.py").unlink()
    (tmp_path / "x.py").mkdir()
    named = pytest.raises(UsageProblem, match=r"Cannot read .*x\.py: Is a directory")
    with named:
        UploadCache(ClusterNamespace("https://cluster.example", "ns"), tmp_path).digest(tree)
    with tempfile.TemporaryFile() as file, named:
        pack.write(workspace, [0], file)


def test_a_file_that_outgrows_the_zip_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size selects the format of its entry, which has a limit without zip64."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 8 << 20)
    (tmp_path / "x.bin").write_bytes(os.urandom(1 << 20))
    workspace = listed(tmp_path)
    with (tmp_path / "x.bin").open("ab") as growing:
        growing.write(os.urandom(16 << 20))
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(UsageProblem, match=r"x\.bin changed during the upload"),
    ):
        pack.write(workspace, [0], file)


def test_data_that_looks_like_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(100_000))
    limits = UploadLimits(ratio=10, ratio_floor=1000)
    with tempfile.TemporaryFile() as file, pytest.raises(UsageProblem, match="nearly all zeros"):
        pack.write(listed(tmp_path), [0], file, limits=limits)
