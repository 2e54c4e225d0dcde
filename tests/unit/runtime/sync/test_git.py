"""A workspace from git, over https to git's own http-backend."""

import json
import os
import random
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from torchrun_runtime.sync.claim import Claim, Marker
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.secret import Secret
from torchrun_runtime.sync.settings import Limits, Settings
from unit.runtime.git_server import GitServer, authority, commit, git, plant, repository, serving
from unit.runtime.syncing import needs_mount, on_small_disk, process

PASSWORD = "pass-word-that-nobody-may-read"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority(folder)
    return folder


@pytest.fixture
def server(tmp_path: Path, pki: Path) -> Iterator[GitServer]:
    with serving(tmp_path / "repositories", pki) as running:
        yield running


@pytest.fixture
def secret(tmp_path: Path, pki: Path) -> Path:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "ca.crt").write_bytes((pki / "ca.crt").read_bytes())
    return folder


@pytest.fixture
def settings(tmp_path: Path, server: GitServer, secret: Path) -> Settings:
    directory = tmp_path / "claim"
    directory.mkdir()
    return Settings(
        source="git",
        url=server.url("train"),
        directory=directory,
        secret="login",
        secret_directory=secret,
        fetch_timeout=60,
    )


def tree(settings: Settings, marker: Marker) -> dict[str, bytes]:
    root = Claim(settings.directory).tree(marker.revision)
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            assert not path.is_symlink()
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


def failure(settings: Settings) -> SyncError:
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert Claim(settings.directory).marker() is None
    there = {path.name for path in settings.directory.iterdir()}
    assert there <= {"state", "env"}, "nothing is left behind"
    return caught.value


def test_the_default_branch_with_every_kind_of_file(settings: Settings, server: GitServer):
    files = {"train.py": b"print()", "pkg/a b/\u6f22.txt": b"x" * 3_000_000, "empty": b""}
    made = repository(server.root / "train", files)
    (server.root / "train" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (server.root / "train" / "run.sh").chmod(0o755)
    made = commit(server.root / "train", {})
    marker = fetch(settings)
    assert (marker.commit, marker.files) == (made, 4)
    assert tree(settings, marker) == files | {"run.sh": b"#!/bin/sh\n"}
    root = Claim(settings.directory).tree(marker.revision)
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "train.py").stat().st_mode & 0o777 == 0o644
    assert not (settings.directory / ".incoming").exists()


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize(
    "ref", ["dev", "refs/heads/dev", "v1", "refs/tags/v1", "light", "feature/a+b#1", "first"]
)
def test_branches_tags_and_commits(settings: Settings, server: GitServer, ref: str, version: int):
    server.version = version
    source = server.root / "train"
    first = repository(source, {"a": b"1"})
    git(source, "tag", "light")
    git(source, "tag", "-a", "v1", "-m", "v1")
    git(source, "branch", "feature/a+b#1")
    dev = commit(source, {"a": b"2"})
    git(source, "branch", "dev")
    commit(source, {"a": b"3"})
    wanted = first if ref == "first" else ref
    marker = fetch(replace(settings, ref=wanted))
    expected = (dev, b"2") if "dev" in ref else (first, b"1")
    assert (marker.commit, tree(settings, marker)["a"]) == expected


def test_a_commit_that_the_server_gives_by_no_name_is_found_in_the_history(
    settings: Settings, server: GitServer, capsys: pytest.CaptureFixture[str]
):
    server.version = 0
    source = server.root / "train"
    repository(source, {"a": b"1"})
    wanted = commit(source, {"a": b"2"})
    for number in range(150):
        git(source, "commit", "--quiet", "--allow-empty", "-m", str(number))
    assert fetch(replace(settings, ref=wanted)).commit == wanted
    assert [json.loads(line).get("depth") for line in capsys.readouterr().out.splitlines()].count(
        2000
    ) == 1


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("ref", ["no-such-branch", "f" * 40, "refs/heads/none", "abc123"])
def test_a_ref_that_is_gone(settings: Settings, server: GitServer, ref: str, version: int):
    server.version = version
    repository(server.root / "train", {"a": b"1"})
    error = failure(replace(settings, ref=ref))
    assert (error.reason, error.permanent) == ("RefNotFound", False)
    assert ref in error.message
    assert settings.url in error.message


def test_a_folder_of_the_repository(settings: Settings, server: GitServer):
    repository(server.root / "train", {"llm/a.py": b"1", "llm/b/c": b"2", "other": b"3"})
    marker = fetch(replace(settings, sub_path="llm"))
    assert tree(settings, marker) == {"a.py": b"1", "b/c": b"2"}


@pytest.mark.parametrize(("path", "words"), [("none", "does not exist"), ("llm/a.py", "is a file")])
def test_a_folder_that_is_none(settings: Settings, server: GitServer, path: str, words: str):
    repository(server.root / "train", {"llm/a.py": b"1"})
    error = failure(replace(settings, sub_path=path))
    assert error.reason == "SubPathNotFound"
    assert words in error.message


def test_links_inside_become_what_they_point_to(settings: Settings, server: GitServer):
    repository(
        server.root / "train",
        {
            "a/data": b"1",
            "a/up": "../b/file",
            "b/file": b"2",
            "b/dir": "../a",
            "chain": "b/dir/up",
            "a/here": "./data",
        },
    )
    marker = fetch(settings)
    a = {"data": b"1", "up": b"2", "here": b"1"}
    assert tree(settings, marker) == {
        "b/file": b"2",
        "chain": b"2",
        **{f"a/{name}": content for name, content in a.items()},
        **{f"b/dir/{name}": content for name, content in a.items()},
    }


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "missing", "a/../../x", "self", "x/y", "."]
)
def test_a_link_that_leaves_the_workspace_is_refused_by_name(
    settings: Settings, server: GitServer, target: str
):
    repository(server.root / "train", {"a/file": b"1", "self": target})
    error = failure(settings)
    assert (error.reason, error.permanent) == ("UnsafeMember", True)
    assert "self" in error.message


def test_links_that_multiply_are_stopped(settings: Settings, server: GitServer):
    files: dict[str, bytes | str] = {"d0/file": b"x"}
    for level in range(1, 20):
        files |= {f"d{level}/{n}": f"../d{level - 1}" for n in range(10)}
    repository(server.root / "train", files)
    error = failure(replace(settings, limits=Limits(entries=5000)))
    assert error.reason == "TooManyEntries"


def test_submodules_and_lfs_are_left_out_and_said(
    settings: Settings, server: GitServer, capsys: pytest.CaptureFixture[str]
):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    plant(
        server.root / "train",
        [
            ("100644", b".gitattributes", b"* filter=lfs text eol=crlf ident export-ignore\n"),
            ("100644", b"model.bin", pointer),
            ("160000", b"sub", b"1" * 40),
        ],
    )
    marker = fetch(settings)
    assert tree(settings, marker)["model.bin"] == pointer
    assert "sub" not in tree(settings, marker)
    said = capsys.readouterr().out
    assert "submodules are left out" in said
    assert "pointers of Git LFS" in said


@contextmanager
def connecting() -> Iterator[tuple[str, list[str]]]:
    """A proxy that knows CONNECT alone; its URL, and what it was asked for."""
    asked: list[str] = []

    class Proxy(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode().strip())
            while self.rfile.readline().strip():
                pass
            host, _, port = asked[-1].split()[1].rpartition(":")
            with socket.create_connection((host, int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=pump, args=(far, self.connection))
                back.start()
                pump(self.connection, far)
                back.join()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}", asked
        proxy.shutdown()


@pytest.mark.parametrize("excepted", [False, True], ids=["proxied", "no proxy"])
def test_a_repository_behind_the_proxy_of_the_pod(
    settings: Settings, server: GitServer, monkeypatch: pytest.MonkeyPatch, excepted: bool
):
    repository(server.root / "train", {"train.py": b"1"})
    with connecting() as (url, asked):
        monkeypatch.setenv("HTTPS_PROXY", url)
        monkeypatch.setenv("NO_PROXY", "localhost" if excepted else "")
        assert tree(settings, fetch(settings)) == {"train.py": b"1"}
    line = f"CONNECT localhost:{server.port} HTTP/1.1"
    assert set(asked) == (set() if excepted else {line})


def test_a_name_that_only_the_proxy_can_resolve(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """An address is judged here all the same."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    named = replace(settings, url="https://git.invalid/train", secret="", secret_directory=None)
    assert failure(named).reason == "ConnectionFailed"
    for host in ("169.254.169.254", "2852039166", "[::ffff:169.254.169.254]"):
        assert failure(replace(named, url=f"https://{host}/a")).reason == "ForbiddenAddress"


def test_a_private_repository(settings: Settings, server: GitServer, secret: Path):
    repository(server.root / "train", {"a": b"1"})
    server.login = f"me:{PASSWORD}"
    (secret / "username").write_text("me\n")
    (secret / "password").write_text(f"{PASSWORD}\n")
    assert fetch(settings).files == 1


@pytest.mark.parametrize("given", ["", "another-password"])
def test_a_wrong_or_missing_password(
    settings: Settings, server: GitServer, secret: Path, given: str
):
    repository(server.root / "train", {"a": b"1"})
    server.login = f"me:{PASSWORD}"
    if given:
        (secret / "username").write_text("me")
        (secret / "password").write_text(given)
    error = failure(settings)
    assert (error.reason, error.permanent) == ("AccessDenied", False)
    assert "secretRef" in error.message
    assert "another" not in error.message


def test_a_secret_that_is_not_there(settings: Settings, server: GitServer, tmp_path: Path):
    (tmp_path / "none").mkdir()
    error = failure(replace(settings, secret_directory=tmp_path / "none"))
    assert (error.reason, error.permanent) == ("SecretNotFound", False)
    assert "login" in error.message


def test_a_secret_without_its_key(settings: Settings, secret: Path):
    (secret / "ca.crt").unlink()
    (secret / "token").write_text("t")
    error = failure(settings)
    assert (error.reason, error.permanent) == ("SecretKeyMissing", False)
    assert "password" in error.message
    assert "token" in error.message


def test_a_repository_that_is_not_there(settings: Settings, server: GitServer):
    server.root.mkdir()
    error = failure(settings)
    assert (error.reason, error.permanent) == ("RepositoryNotFound", False)


def test_a_server_whose_authority_is_unknown(settings: Settings, server: GitServer):
    repository(server.root / "train", {"a": b"1"})
    error = failure(replace(settings, secret="", secret_directory=None))
    assert error.reason == "CertificateInvalid"
    assert "ca.crt" in error.message


@pytest.mark.parametrize(
    "where", ["http://169.254.169.254", "https://localhost:1", "file:///etc", "ext::sh -c id"]
)
def test_redirects_are_not_followed(settings: Settings, server: GitServer, where: str):
    server.redirect = where
    error = failure(settings)
    assert (error.reason, error.permanent) == ("Redirected", True), error.message


def test_a_connection_that_breaks(settings: Settings, server: GitServer):
    noise = random.Random(1).randbytes(1 << 20)
    repository(server.root / "train", {"noise": noise})
    server.cut = 1 << 18
    error = failure(settings)
    assert (error.reason, error.permanent) == ("ConnectionLost", False)
    server.cut = 0
    assert fetch(settings).files == 1


def test_a_server_that_is_not_there(settings: Settings):
    error = failure(replace(settings, url="https://127.0.0.1:1/train"))
    assert (error.reason, error.permanent) == ("ConnectionFailed", False)


def test_a_fetch_that_takes_too_long(settings: Settings, server: GitServer):
    repository(server.root / "train", {"a": b"1"})
    error = failure(replace(settings, fetch_timeout=0.0))
    assert (error.reason, error.permanent) == ("TimedOut", False)


def test_a_pack_that_is_larger_than_a_workspace_may_be(settings: Settings, server: GitServer):
    repository(server.root / "train", {"noise": random.Random(1).randbytes(1 << 20)})
    error = failure(replace(settings, limits=Limits(bytes=1 << 16)))
    assert error.reason == "WorkspaceTooLarge", error.message


def test_what_is_there_already_is_not_fetched_again(settings: Settings, server: GitServer):
    made = repository(server.root / "train", {"a": b"1"})
    settings = replace(settings, digest="d1")
    first = fetch(settings)
    server.paths.clear()
    assert fetch(settings) == first
    assert fetch(replace(settings, commit=made)) == first
    assert server.paths == []
    newer = commit(server.root / "train", {"a": b"2"})
    again = fetch(replace(settings, digest="d2"))
    assert (again.commit, again.revision) == (newer, first.revision + 1)
    assert fetch(replace(settings, digest="d2", commit=made)).commit == made
    asked = fetch(replace(settings, digest="d3", commit=made))
    assert asked.commit == newer, "somebody asked since"


def test_what_is_no_other_content_is_no_other_revision(settings: Settings, server: GitServer):
    repository(server.root / "train", {"src/a": b"1", "notes": b"1"})
    settings = replace(settings, sub_path="src")
    first = fetch(replace(settings, digest="d1"))
    newer = commit(server.root / "train", {"src/a": b"1", "notes": b"2"})
    again = fetch(replace(settings, digest="d2"))
    assert (again.commit, again.revision) == (newer, first.revision)
    assert fetch(replace(settings, digest="d2")) == again
    claim = Claim(settings.directory)
    assert claim.marker() == again
    assert not claim.new.exists()


def test_a_revision_follows_those_that_are_known_of(settings: Settings, server: GitServer):
    """Of a pod whose storage begins empty, after one that was lost."""
    repository(server.root / "train", {"a": b"1"})
    first = fetch(replace(settings, digest="d1", after=4))
    assert first.revision == 5
    assert fetch(replace(settings, digest="d1", after=4)) == first


def test_no_secret_in_log_message_or_arguments(tmp_path: Path, server: GitServer, secret: Path):
    """The program as it runs in its pod, watched by its own eyes: /proc of every process."""
    repository(server.root / "train", {"a": b"1"})
    server.login = "me:other"
    (secret / "username").write_text("me")
    (secret / "password").write_text(PASSWORD)
    (tmp_path / "claim").mkdir(exist_ok=True)
    arguments: set[bytes] = set()
    with process(
        tmp_path,
        TORCHRUN_SYNC_SOURCE="git",
        TORCHRUN_SYNC_URL=server.url("train"),
        TORCHRUN_SYNC_SECRET="login",
        TORCHRUN_SYNC_SECRET_DIR=str(secret),
    ) as running:
        while running.process.poll() is None:
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    arguments.add((entry / "cmdline").read_bytes())
                    if (entry / "comm").read_text().startswith("git"):
                        arguments.add((entry / "environ").read_bytes())
                except OSError:
                    continue
        code, message = running.end()
        assert running.process.stdout
        log = running.process.stdout.read()
    assert (code, message["reason"]) == (1, "AccessDenied")
    assert any(b"git" in words for words in arguments)
    assert PASSWORD.encode() not in b"".join(arguments)
    assert PASSWORD not in log + json.dumps(message)
    assert "AccessDenied" in log


@needs_mount
def test_a_claim_that_is_full(tmp_path: Path, server: GitServer, secret: Path):
    repository(server.root / "train", {"noise": random.Random(1).randbytes(3 << 20)})
    (tmp_path / "claim").mkdir(exist_ok=True)
    with process(
        tmp_path,
        *on_small_disk(tmp_path, "1m"),
        TORCHRUN_SYNC_SOURCE="git",
        TORCHRUN_SYNC_URL=server.url("train"),
        TORCHRUN_SYNC_SECRET="login",
        TORCHRUN_SYNC_SECRET_DIR=str(secret),
    ) as running:
        code, message = running.end()
    assert (code, message["reason"], message["permanent"]) == (1, "WorkspaceFull", False)
    assert "volumes.workspace.size" in str(message["message"])


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([("40000", b"..", b"")], "UnsafeName"),
        ([("40000", b".git", b"")], "UnsafeName"),
        ([("40000", b".GIT", b"")], "UnsafeName"),
        ([("100644", b"../x", b"x")], "UnsafeName"),
        ([("100644", b"\xff", b"x")], "UnsafeName"),
        ([("100644", b"a\n", b"x")], "UnsafeName"),
        ([("120000", b"a", b"/etc/passwd")], "UnsafeMember"),
        ([("120000", b"a", b"x" * 5000)], "UnsafeMember"),
        ([("100644", b"A", b"x"), ("100644", b"a", b"y")], "CaseCollision"),
        ([("100644", b"a", b"x"), ("100644", b"a", b"y")], "DuplicateMember"),
    ],
)
def test_trees_that_no_git_would_write(
    settings: Settings, server: GitServer, entries: list[tuple[str, bytes, bytes]], reason: str
):
    source = server.root / "train"
    plant(source, [("100644", b"hooks", b"#!/bin/sh\n")])
    inner = git(source, "rev-parse", "HEAD^{tree}").encode()
    plant(source, [(mode, name, content or inner) for mode, name, content in entries])
    error = failure(settings)
    assert (error.reason, error.permanent) == (reason, True), error.message


def test_a_server_that_says_the_password_back_is_not_quoted(tmp_path: Path):
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "ssh-privatekey").write_text("-----BEGIN-----\nline-of-the-key\n")
    (tmp_path / "username").write_text("train")
    said = f"remote: no {PASSWORD} of line-of-the-key at https://me:x@git.example/train"
    scrubbed = Secret("login", tmp_path).scrub(said)
    assert scrubbed == "remote: no *** of *** at https://git.example/train"
