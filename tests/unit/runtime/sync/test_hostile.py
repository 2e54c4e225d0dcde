"""More than 1,000 hostile archives and 1,000 hostile URLs and refs, by class, from a seed.

None writes outside its directory or hangs, and each is refused with a reason. A refused URL causes
no request.
"""

import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync import programs
from torchrun_runtime.sync.address import parse_git, resolve
from torchrun_runtime.sync.archives.tarball import extract_tar
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import ArchiveError, SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.git.tree import Repository
from torchrun_runtime.sync.s3 import client as s3_client
from torchrun_runtime.sync.settings import ArchiveLimits, SyncSettings
from unit.runtime import hostile, hostile_tars
from unit.runtime.hostile_urls import FINE, FOLDERS, FORBIDDEN, GIT_URLS, REFS, S3_URLS
from unit.runtime.s3_server import Gateway, Reply, Request, behave, listing, serving

SEED = 20260101
OF_EACH = 16
URLS_OF_EACH = 20
SLOWEST = 5.0  # seconds of CPU, which do not depend on other load
LIMITS = ArchiveLimits(
    entries=hostile_tars.LIMIT_ENTRIES,
    bytes=hostile_tars.LIMIT_BYTES,
    ratio=20,
    ratio_floor=1 << 20,
)
ZIP_LIMITS = replace(LIMITS, bytes=1 << 30)
FOLDER_LIMITS = ArchiveLimits()


def cases(name: str, count: int = OF_EACH) -> Iterator[random.Random]:
    for number in range(count):
        yield random.Random(f"{SEED} {name} {number}")


def outside(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def refuse_archive(folder: Path, data: bytes, unpack, label: str) -> ArchiveError:
    """Extract a hostile archive. It may leave only an unfinished tree without links."""
    archive, tree = folder / "archive", folder / "inner" / "tree"
    archive.write_bytes(data)
    tree.parent.mkdir(exist_ok=True)
    before, started = outside(folder), time.process_time()
    with pytest.raises(ArchiveError) as caught:
        print(label, unpack(archive, tree, LIMITS if unpack is extract_tar else ZIP_LIMITS).text)
    assert time.process_time() - started < SLOWEST, label
    for path in map(Path, outside(folder) - before):
        assert path.is_relative_to(tree), label
        assert not path.is_symlink(), label
        assert path.is_file() or path.is_dir(), label
    assert caught.value.reason, label
    assert caught.value.message, label
    for root, folders, names in os.walk(tree, topdown=False):
        for name in names:
            Path(root, name).unlink()
        for name in folders:
            Path(root, name).rmdir()
    if tree.exists():
        tree.rmdir()
    return caught.value


@pytest.mark.parametrize("name", hostile_tars.CLASSES)
def test_tar_archives(tmp_path: Path, name: str):
    for number, chance in enumerate(cases(f"tar {name}")):
        data = hostile_tars.build(name, chance)
        refuse_archive(tmp_path, data, extract_tar, f"{name} {number}")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", hostile.HOSTILE)
def test_zip_archives(tmp_path: Path, name: str):
    for number, chance in enumerate(cases(f"zip {name}", 10)):
        files = {f"{n}": chance.randbytes(chance.randrange(0, 2000)) for n in range(3)}
        data = hostile.build(files, hostile.HOSTILE[name], first=chance.random() < 0.5)
        error = refuse_archive(tmp_path, data, extract, f"{name} {number}")
        assert re.search(hostile.HOSTILE[name].words, error.message), error.message


def test_there_are_a_thousand_archives():
    assert len(hostile_tars.CLASSES) * OF_EACH + len(hostile.HOSTILE) * 10 >= 1000


def test_a_valid_tar_archive_is_accepted(tmp_path: Path):
    """Otherwise the tests above would prove nothing."""
    hostile_tars.CLASSES["fine"] = (hostile_tars.named("./a/b", "\u00e9", "x" * 200), None)
    try:
        for number, chance in enumerate(cases("fine")):
            (tmp_path / "archive").write_bytes(hostile_tars.build("fine", chance))
            tree = tmp_path / str(number)
            assert extract_tar(tmp_path / "archive", tree, LIMITS).files >= 2
    finally:
        del hostile_tars.CLASSES["fine"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SyncSettings:
    """Settings for a test that fails as soon as a program starts or a connection is opened."""

    def never(*_: object, **__: object) -> None:
        pytest.fail("a refused source got as far as the network")

    monkeypatch.setattr(programs.subprocess, "Popen", never)
    monkeypatch.setattr("urllib3.util.connection.create_connection", never)
    directory = tmp_path / "claim"
    directory.mkdir()
    return SyncSettings(source="git", url=FINE, directory=directory, fetch_timeout=120)


def refuse(settings: SyncSettings, *reasons: str) -> SyncError:
    started = time.process_time()
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert time.process_time() - started < SLOWEST
    assert caught.value.reason in reasons, caught.value.message
    assert caught.value.message.isprintable()
    assert Claim(settings.directory).marker() is None
    assert not list(settings.directory.iterdir())
    return caught.value


@pytest.mark.parametrize("name", GIT_URLS)
def test_urls_of_repositories(settings: SyncSettings, name: str):
    expected = "ForbiddenAddress" if name.startswith("forbidden") else "InvalidSource"
    for chance in cases(f"git {name}", URLS_OF_EACH):
        url = GIT_URLS[name](chance)
        error = refuse(replace(settings, url=url), expected)
        assert error.permanent, url


@pytest.mark.parametrize("name", S3_URLS)
def test_urls_of_buckets(settings: SyncSettings, name: str):
    expected = "ForbiddenAddress" if name.startswith("forbidden") else "InvalidSource"
    for chance in cases(f"s3 {name}", URLS_OF_EACH):
        refuse(replace(settings, source="s3", url=S3_URLS[name](chance)), expected)


@pytest.mark.parametrize("name", REFS)
def test_refs(settings: SyncSettings, name: str):
    for chance in cases(f"ref {name}", URLS_OF_EACH):
        ref = REFS[name](chance)
        refuse(replace(settings, ref=ref), "InvalidSource")
        refuse(replace(settings, commit=ref), "InvalidSource")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("source", ["git", "s3"])
def test_folders(settings: SyncSettings, source: str, name: str):
    for chance in cases(f"folder {name}", URLS_OF_EACH):
        refuse(replace(settings, source=source, sub_path=FOLDERS[name](chance)), "InvalidSource")


def test_there_are_a_thousand_urls_and_refs():
    assert (len(GIT_URLS) + len(S3_URLS) + len(REFS)) * URLS_OF_EACH >= 1000


@pytest.mark.parametrize("address", FORBIDDEN)
def test_every_spelling_of_a_forbidden_address(settings: SyncSettings, address: str):
    refuse(replace(settings, url=f"https://{address}/a"), "ForbiddenAddress")
    refuse(replace(settings, url=f"ssh://git@{address}:22/a"), "ForbiddenAddress")
    refuse(replace(settings, source="s3", url=f"http://{address}/bucket/a"), "ForbiddenAddress")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://[2001:db8::1]/acme/train.git", "2001:db8::1", 443),
        ("ssh://git@[2001:db8::1]:2222/acme/train.git", "2001:db8::1", 2222),
        ("https://[::1]/train.git", "::1", 443),
    ],
)
def test_addresses_of_ipv6_in_their_usual_form(url: str, host: str, port: int):
    found = parse_git(url)
    assert (found.host, found.port) == (host, port)
    assert resolve(found.host, found.port) == (host,)


def test_a_name_that_resolves_to_a_forbidden_address(
    settings: SyncSettings, monkeypatch: pytest.MonkeyPatch
):
    """One forbidden address among several is enough."""
    found = [(0, 0, 0, "", (address, 443)) for address in ("192.0.2.1", "169.254.169.254")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    refuse(settings, "ForbiddenAddress")


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving() as running:
        yield running


@pytest.fixture
def bucket(tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> SyncSettings:
    monkeypatch.setattr(s3_client, "PAUSE", 0.001)
    (tmp_path / "claim").mkdir()
    return SyncSettings(
        source="s3",
        url=gateway.url("bucket/code"),
        directory=tmp_path / "claim",
        fetch_timeout=120,
        limits=LIMITS,
    )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_to_metadata_addresses(bucket: SyncSettings, gateway: Gateway, status: int):
    for address in FORBIDDEN:
        location = {"Location": f"http://{address}/latest/meta-data/"}
        gateway.answer = lambda _, headers=location: Reply(status=status, headers=headers)
        refuse(bucket, "Redirected")
    assert len(gateway.requests) == len(FORBIDDEN), "no second request"


@pytest.mark.parametrize(
    "key",
    [
        *("code/../x", "code//x", "code//etc/x", "code/./x", "code/a\nb", "code/a\\b", "other/x"),
        *("code/a\x1b[2J", "code/..", "code/" + "d/" * 100 + "x", "code/" + "p" * 256, "/etc/x"),
    ],
)
def test_keys_of_a_hostile_gateway(bucket: SyncSettings, gateway: Gateway, key: str):
    gateway.answer = lambda request: (
        Reply(b"x", headers={"ETag": '"e"'}) if request.key else Reply(listing({key: b"x"}))
    )
    with pytest.raises(SyncError) as caught:
        fetch(bucket)
    assert caught.value.reason == "InvalidFile"


@pytest.mark.parametrize("size", ["", "-1", "x", "1e9", "99999999999999999999"])
def test_sizes_of_a_hostile_gateway(bucket: SyncSettings, gateway: Gateway, size: str):
    gateway.answer = lambda _: Reply(listing({"code/a": b"x"}, size=size))
    refuse(bucket, "FetchFailed", "WorkspaceTooLarge")


def test_an_object_longer_than_its_content_length(bucket: SyncSettings, gateway: Gateway):
    def answer(request: Request) -> Reply:
        if not request.key:
            return Reply(listing({"code/a": b"x"}, etag="e"))
        return Reply(bytes(1 << 20), headers={"ETag": '"e"'})

    gateway.answer = answer
    marker = fetch(bucket)
    assert marker.bytes == 1, "exactly the announced bytes are stored"


@pytest.mark.parametrize("name", [*hostile_tars.CLASSES])
def test_hostile_archives_in_a_bucket(bucket: SyncSettings, gateway: Gateway, name: str):
    for chance in cases(f"bucket {name}", 2):
        data = hostile_tars.build(name, chance)
        gateway.answer = behave({"code.tar.gz": data})
        with pytest.raises(SyncError) as caught:
            fetch(replace(bucket, url=gateway.url("bucket/code.tar.gz")))
        assert caught.value.permanent
        assert caught.value.reason
        assert not list(bucket.directory.iterdir())


GIT_RECORDS = {
    "traversal": (b"../x", b"a/../x", b"..", b"a/..", b"./x", b"a//x"),
    "absolute": (b"/etc/x", b"//x"),
    "git's own": (b".git/config", b".GIT/hooks/x", b"a/.git", b"git~1/x", b".git /x", b".git./x"),
    "git's own, hidden": (b".g\xe2\x80\x8cit/x", b"\xe2\x80\xaa.git/x"),
    "control": (b"a\nb", b"\x1b[2J", b"a\x7f"),
    "encoding": (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf"),
    "backslash": (b"..\\x",),
    "too long": (b"p" * 256, b"/".join([b"p" * 99] * 50)),
    "too deep": (b"d/" * 100 + b"x",),
}


@pytest.mark.parametrize("name", GIT_RECORDS)
@pytest.mark.parametrize("mode", ["100644", "100755", "120000", "160000"])
def test_paths_of_a_hostile_repository(name: str, mode: str):
    kind = b"commit" if mode == "160000" else b"blob"
    for path in GIT_RECORDS[name]:
        with pytest.raises(ArchiveError):
            Repository(FOLDER_LIMITS).add(
                mode.encode() + b" " + kind + b" " + b"0" * 40 + b"       1\t" + path
            )


@pytest.mark.parametrize("mode", ["040755", "100600", "0", "060000", "020000", "010644"])
def test_modes_of_a_hostile_repository(mode: str):
    with pytest.raises(ArchiveError):
        Repository(FOLDER_LIMITS).add(f"{mode} blob {'0' * 40} 1\tname".encode())


def linked(links: dict[str, str], *files: str) -> Repository:
    found = Repository(FOLDER_LIMITS)
    for name in files:
        found.add(f"100644 blob {'a' * 40} 1\t{name}".encode())
    targets = {f"{number:040}": target.encode() for number, target in enumerate(links.values())}
    for number, name in enumerate(links):
        found.add(f"120000 blob {number:040} 10\t{name}".encode())
    found.read_links(lambda blob: targets[blob.name])
    return found


def test_chains_of_links_take_linear_time():
    """Each link goes eight times through the previous one: 8 ** 30 steps to follow them all."""
    links = {"l0": "/".join(["d", ".."] * 8 + ["d"])}
    links |= {f"l{n}": "/".join([f"l{n - 1}", ".."] * 8 + [f"l{n - 1}"]) for n in range(1, 30)}
    with pytest.raises(ArchiveError, match="more than 40 links") as caught:
        list(linked(links, "d/x").files())
    assert caught.value.reason == "InvalidFile"


@pytest.mark.parametrize(("count", "fine"), [(40, True), (41, False)])
def test_a_path_may_have_as_many_links_as_the_kernel_follows(count: int, fine: bool):
    links = {f"l{number:02}": f"l{number + 1:02}" for number in range(count - 1)}
    found = linked(links | {f"l{count - 1:02}": "file"}, "file")
    if fine:
        assert len(list(found.files())) == count + 1
    else:
        with pytest.raises(ArchiveError, match="more than 40 links"):
            list(found.files())


def test_links_are_listed_until_the_deadline_only():
    ended = programs.Programs({}, deadline=time.monotonic() - 1, largest=1)
    with pytest.raises(SyncError) as caught:
        list(linked({"l": "d"}, "d/x").files(ended.check_time))
    assert (caught.value.reason, caught.value.permanent) == ("FetchFailed", False)


@pytest.mark.parametrize("kind", [b"L", b"x", b"g"], ids=["long name", "pax", "global"])
def test_endless_tar_headers(tmp_path: Path, kind: bytes):
    content = b"6 a=b\n" if kind != b"L" else b"a\0"
    one = hostile_tars.header(b"x", b"%011o\0" % len(content), kind) + content.ljust(512, b"\0")
    archive = tmp_path / "archive"
    archive.write_bytes(one * 3000 + bytes(1024))
    with pytest.raises(ArchiveError) as caught:
        extract_tar(archive, tmp_path / "tree", LIMITS)
    assert caught.value.reason == "InvalidArchive"


@pytest.mark.parametrize("etag", ["a&#10;b", "&#8364;", "a" * 2000])
def test_etags_of_a_hostile_gateway(bucket: SyncSettings, gateway: Gateway, etag: str):
    gateway.answer = lambda _: Reply(listing({"code/a": b"x"}, etag=etag))
    error = refuse(bucket, "FetchFailed")
    assert "ETag" in error.message
    assert error.message.isprintable()
