"""Which files become part of a workspace."""

import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_torchrun.cluster.kubectl import ClusterNamespace
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload.cache import UploadCache
from kubectl_torchrun.upload.tree import scan
from profiles import examples


def make(root: Path, *paths: str, **contents: str) -> None:
    """Create files with their path as content, and directories if the path ends with a slash."""
    for path in paths:
        if path.endswith("/"):
            (root / path).mkdir(parents=True)
            continue
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    for name, text in contents.items():
        (root / {"gitignore": ".gitignore", "torchrunignore": ".torchrunignore"}[name]).write_text(
            text
        )


def paths(root: Path) -> list[str]:
    return [file.path for file in scan(root).files]


def skipped(root: Path) -> dict[str, str]:
    return dict(scan(root).skipped)


def test_files_are_sorted_by_name_and_have_their_mode(tmp_path: Path) -> None:
    make(tmp_path, "b.py", "a/c.py", "a.py", "B")
    (tmp_path / "b.py").chmod(0o755)
    files = scan(tmp_path).files
    assert [file.path for file in files] == ["B", "a.py", "a/c.py", "b.py"]
    assert [file.executable for file in files] == [False, False, False, True]
    assert [file.size for file in files] == [1, 4, 6, 4]


def test_caches_of_tools_are_not_sent(tmp_path: Path) -> None:
    make(tmp_path, "x.py", ".git/HEAD", "sub/.git", "__pycache__/x.pyc", "cache/data", "venv/lib")
    make(tmp_path, "cache/CACHEDIR.TAG", "venv/pyvenv.cfg")
    assert paths(tmp_path) == ["x.py"]
    assert list(skipped(tmp_path)) == ["venv"]


@pytest.mark.parametrize("descriptor", [1, 2])
def test_the_file_of_the_own_output_is_not_sent(tmp_path: Path, descriptor: int) -> None:
    make(tmp_path, "x.py", "run.log")
    saved = os.dup(descriptor)
    try:
        with (tmp_path / "run.log").open("a") as log:
            os.dup2(log.fileno(), descriptor)
            tree = scan(tmp_path)
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
    assert [file.path for file in tree.files] == ["x.py"]
    assert tree.skipped == (("run.log", "this command writes its output to it"),)
    assert paths(tmp_path) == ["run.log", "x.py"]


@pytest.mark.parametrize("name", [".env", ".env.local", "tls.pem", "id_rsa", "sub/.netrc"])
def test_likely_secrets_are_skipped_and_named(tmp_path: Path, name: str) -> None:
    make(tmp_path, "x.py", name, ".env.example")
    assert paths(tmp_path) == [".env.example", "x.py"]
    assert skipped(tmp_path) == {name: "may contain a secret"}


def test_torchrunignore_can_include_a_secret_and_gitignore_cannot(tmp_path: Path) -> None:
    make(tmp_path, ".env", "a.pem", gitignore="!.env\n!a.pem\n", torchrunignore="!a.pem\n")
    assert skipped(tmp_path) == {
        ".env": "may contain a secret",
        "a.pem": "may contain a secret, and .torchrunignore includes it",
    }
    files = scan(tmp_path, allowed={".env", "a.pem"}).files
    assert [file.path for file in files] == [".gitignore", ".torchrunignore", "a.pem"]


def test_torchrunignore_extends_and_overrides_gitignore(tmp_path: Path) -> None:
    make(tmp_path, "data/x", "runs/y", "x.py", "big.bin", gitignore="data/\nruns/\n")
    make(tmp_path, torchrunignore="*.bin\n!data/\n")
    assert paths(tmp_path) == [".gitignore", ".torchrunignore", "data/x", "x.py"]


def test_rules_of_parent_directories_apply_within_the_repository(tmp_path: Path) -> None:
    make(tmp_path, ".gitignore", "repo/.git/HEAD", "repo/project/x.log", "repo/project/x.py")
    (tmp_path / ".gitignore").write_text("*.py\n")
    (tmp_path / "repo/.gitignore").write_text("*.log\n/project/x.bin\n")
    make(tmp_path, "repo/project/x.bin", "repo/project/sub/x.bin")
    assert paths(tmp_path / "repo/project") == ["sub/x.bin", "x.py"]


def test_an_ignored_directory_can_be_sent_itself(tmp_path: Path) -> None:
    make(tmp_path, ".git/HEAD", "scratch/x.py", gitignore="scratch/\n")
    assert paths(tmp_path / "scratch") == ["x.py"]


def test_empty_directories_stay(tmp_path: Path) -> None:
    make(tmp_path, "x.py", "logs/a.log", gitignore="*.log\n")
    (tmp_path / "out/deep").mkdir(parents=True)
    assert scan(tmp_path).empty_directories == ("logs", "out/deep")


def test_links_within_the_tree_are_sent_as_copies(tmp_path: Path) -> None:
    make(tmp_path, "lib/a.py", "lib/sub/b.py")
    (tmp_path / "one.py").symlink_to("lib/a.py")
    (tmp_path / "two.py").symlink_to(tmp_path / "one.py")
    (tmp_path / "copy").symlink_to("lib")
    (tmp_path / "lib/c.py").symlink_to("sub/b.py")
    taken = {file.path: file.source.read_text() for file in scan(tmp_path).files}
    assert taken == {
        "copy/a.py": "lib/a.py",
        "copy/c.py": "lib/sub/b.py",
        "copy/sub/b.py": "lib/sub/b.py",
        "lib/a.py": "lib/a.py",
        "lib/c.py": "lib/sub/b.py",
        "lib/sub/b.py": "lib/sub/b.py",
        "one.py": "lib/a.py",
        "two.py": "lib/a.py",
    }


def test_links_that_leave_the_tree_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "outside/data", "project/x.py")
    (tmp_path / "project/data").symlink_to("../outside/data")
    (tmp_path / "project/etc").symlink_to("/etc")
    with pytest.raises(UsageProblem, match=r"data -> \.\./outside/data\n  etc -> /etc\n"):
        scan(tmp_path / "project")


def test_links_that_go_in_a_circle_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "a/x", "b/y")
    (tmp_path / "a/to_b").symlink_to("../b")
    (tmp_path / "b/to_a").symlink_to("../a")
    with pytest.raises(UsageProblem, match="point outside the directory"):
        scan(tmp_path)


def test_links_that_multiply_the_files_are_refused(tmp_path: Path) -> None:
    """Forty directories, each with two links to the previous one: 2**40 files."""
    make(tmp_path, "d0/x.py")
    for level in range(1, 41):
        (tmp_path / f"d{level}").mkdir()
        for name in ("one", "two"):
            (tmp_path / f"d{level}" / name).symlink_to(f"../d{level - 1}")
    started = time.process_time()
    with pytest.raises(
        UsageProblem, match=r"more than 200,000 files\b.*\n  d\d+/one -> \.\./d\d+\n"
    ):
        scan(tmp_path)
    assert time.process_time() - started < 30


def test_many_circles_are_refused_at_once(tmp_path: Path) -> None:
    """Twenty directories with links to each other and to their parent: 20! paths."""
    for one in range(20):
        make(tmp_path, f"d{one}/x.py")
        (tmp_path / f"d{one}" / "up").symlink_to("..")
        for other in range(20):
            (tmp_path / f"d{one}" / f"to{other}").symlink_to(f"../d{other}")
    started = time.process_time()
    with pytest.raises(UsageProblem, match=r"themselves:\n  d\d+/"):
        scan(tmp_path)
    assert time.process_time() - started < 30


def test_each_link_to_a_directory_is_a_copy_of_it(tmp_path: Path) -> None:
    make(tmp_path, "lib/a.py", "lib/sub/b.py", "x/y.py")
    for name in ("one", "two", "x/three"):
        (tmp_path / name).symlink_to(tmp_path / "lib")
    copied = [
        f"{top}/{file}" for top in ("lib", "one", "two", "x/three") for file in ("a.py", "sub/b.py")
    ]
    assert paths(tmp_path) == sorted([*copied, "x/y.py"])


def test_ignore_rules_apply_to_the_targets_of_links(tmp_path: Path) -> None:
    make(tmp_path, "x.py", ".env", "runs/1/big", ".git/config", gitignore="runs/\n")
    for name, target in {"e": ".env", "latest": "runs/1", "g": ".git", "gone": "nothing"}.items():
        (tmp_path / name).symlink_to(target)
    assert paths(tmp_path) == [".gitignore", "x.py"]
    assert {"e", "latest", "g", "gone", ".env"} == set(skipped(tmp_path))


def test_special_files_are_skipped(tmp_path: Path) -> None:
    make(tmp_path, "x.py")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        assert paths(tmp_path) == ["x.py"]
        assert set(skipped(tmp_path)) == {"pipe", "socket"}


@pytest.mark.parametrize("replace", [Path.mkdir, Path.touch, lambda place: None])
def test_a_directory_may_disappear_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[[Path], None]
) -> None:
    make(tmp_path, "gone/a.py", "x.py")
    scandir = os.scandir

    def remove_and_scan(place: Path) -> Iterator[os.DirEntry[str]]:
        if place.name == "gone":
            (place / "a.py").unlink()
            place.rmdir()
            replace(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", remove_and_scan)
    assert paths(tmp_path) == ["x.py"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    make(tmp_path, "x.py")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/.torchrunignore").symlink_to(".torchrunignore")
    with pytest.raises(UsageProblem, match=r"Cannot read .*/\.torchrunignore: Too many levels"):
        scan(tmp_path)


PLACES = st.sampled_from(["", "a", "a/b", "c"])
RULES = st.sampled_from(
    [
        "x",
        "*.log",
        "[y-a]*",
        "!x",
        "/x",
        "b/",
        "!b/",
        "a/*",
        "*",
        "!*/",
        "!y.log",
        "**/x",
        "a/b/x",
        "/*/x",
    ]
)


@pytest.mark.long
@examples(30)
@given(st.dictionaries(PLACES, st.lists(RULES, min_size=1, max_size=3), max_size=3))
def test_nested_ignore_files_work_as_in_git(
    tmp_path_factory: pytest.TempPathFactory, rules: dict[str, list[str]]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    make(root, *(f"{place}/{name}".lstrip("/") for place in ("", "a", "a/b", "c")
                 for name in ("x", "y.log", "z")))  # fmt: skip
    for place, lines in rules.items():
        (root / place / ".gitignore").write_text("\n".join(lines))
    subprocess.run(["git", "init", "-q", root], check=True)
    command = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(root), "ls-files", "-z", "-o"]
    listed = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=True)
    assert set(paths(root)) == set(listed.stdout.decode().split("\0")) - {""}


def git(directory: Path, *arguments: str) -> str:
    config = ["user.name=a", "user.email=a@example.com", "protocol.file.allow=always"]
    flags = [flag for value in config for flag in ("-c", value)]
    command = ["git", *flags, "-c", "core.excludesFile=/dev/null", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def repository(root: Path, *tracked: str, **contents: str) -> Path:
    make(root, *tracked, **contents)
    git(root, "init", "-q")
    git(root, "add", "-f", *tracked)
    git(root, "commit", "-qm", "one")
    return root


def with_submodule(root: Path, *flags: str) -> None:
    repository(root / "../loader", "data/load.py", "x.json")
    repository(root, "train.py", "config.json", gitignore="data/\n*.json\n")
    git(root, "submodule", "add", "-q", *flags, "../loader", "libs/loader")
    make(root, "data/big.bin", "libs/loader/data/more.py", "other.json")


def with_nested_repository(root: Path) -> None:
    repository(root, "x.py", "keep/data/y.py", gitignore="data/\n*.json\n/skipped/\n")
    repository(root / "nested", "z.py", gitignore="*.bin\n")
    repository(root / "skipped", "z.py")
    make(root, "nested/data/x", "nested/x.json", "nested/x.bin", "keep/data/no.py")


def with_worktree(root: Path) -> None:
    repository(root / "../main", "a/b/x.json", "x.py", gitignore="a/\n")
    git(root / "../main", "worktree", "add", "-q", str(root))
    make(root, "a/b/no.py", gitignore="a/\n")


def with_split_index(root: Path) -> None:
    repository(root, "a/x.py", "a/y.py", gitignore="a/\n")
    git(root, "update-index", "--split-index")
    make(root, "a/z.py", "a/no.py")
    git(root, "add", "-f", "a/z.py")


def of_version(version: int, *flags: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        root.mkdir()
        git(root, "init", "-q", *flags)
        names = [f"data/{'long' * (n % 9)}/{n}.py" for n in range(50)]
        repository(root, *names, "é.py", gitignore="data/\n")
        git(root, "update-index", "--index-version", str(version))
        make(root, "data/no.py", "data/9/no.py", "data/intended.py")
        git(root, "add", "-f", "-N", "data/intended.py")

    return build


@pytest.mark.parametrize(
    "build",
    [
        with_submodule,
        with_nested_repository,
        with_worktree,
        with_split_index,
        of_version(2),
        of_version(3),
        of_version(4),
        of_version(4, "--object-format=sha256"),
    ],
)
def test_the_files_that_git_tracks_are_sent(tmp_path: Path, build: Callable[[Path], None]) -> None:
    """In repositories within others, too, and from a directory within one."""
    root = tmp_path / "top"
    build(root)
    flags = ("ls-files", "-z", "--exclude-standard")
    expected = {*git(root, *flags, "-c", "-o").split("\0")} - {""}
    for path in [path for path in expected if (root / path).is_dir()]:
        inner = git(root / path, *flags, "-c", "-o").split("\0")
        expected |= {f"{path.rstrip('/')}/{name}" for name in inner if name}
        expected.remove(path)
    assert set(paths(root)) == expected
    for folder in {path.rpartition("/")[0] for path in expected} - {""}:
        start = len(folder) + 1
        below = {path[start:] for path in expected if path.startswith(f"{folder}/")}
        assert below <= set(paths(root / folder)), folder


def test_torchrunignore_excludes_what_git_tracks(tmp_path: Path) -> None:
    repository(tmp_path, "data/x", "x.bin", "x.py", "a.pem", torchrunignore="data/\n*.bin\n")
    assert paths(tmp_path) == [".torchrunignore", "x.py"]
    assert skipped(tmp_path) == {"a.pem": "may contain a secret"}


@pytest.mark.parametrize(
    "change", [b"DIRX", b"DIRC\0\0\0\x09", b"DIRC\0\0\0\x02\xff\xff\xff\xff", b""]
)
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, change: bytes) -> None:
    repository(tmp_path, "data/x", "x.py", gitignore="data/\n")
    index = tmp_path / ".git/index"
    content = index.read_bytes()
    index.write_bytes(change + content[len(change) :] if change else b"")
    assert paths(tmp_path) == [".gitignore", "x.py"]
    assert "tracked files that match .gitignore are not uploaded" in skipped(tmp_path)[".git"]


def test_overlay_files_replace_files_of_the_tree(tmp_path: Path) -> None:
    below, above = tmp_path / "below", tmp_path / "above"
    make(below, "a.py", "sub/b.py")
    (below / "empty").mkdir()
    make(above, "a.py", "sub/c.py", "empty/d.py")
    merged = scan(below, above)
    assert [(file.path, file.source.parent.parts[-1]) for file in merged.files] == [
        ("a.py", "above"),
        ("empty/d.py", "empty"),
        ("sub/b.py", "sub"),
        ("sub/c.py", "sub"),
    ]
    assert merged.empty_directories == ()


def test_ignore_files_above_an_overlay_do_not_apply(tmp_path: Path) -> None:
    """It may be in a temporary directory within some repository."""
    project, overlay = tmp_path / "project", tmp_path / "repository" / "tmp" / "overlay"
    for file in (project / "train.py", overlay / "call.json", overlay / "a.log"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "repository" / ".gitignore").write_text("*.json\n")
    (overlay / ".gitignore").write_text("*.log\n")
    paths = [file.path for file in scan(project, overlay).files]
    assert paths == [".gitignore", "call.json", "train.py"]


def test_empty_directories_of_an_overlay_are_merged(tmp_path: Path) -> None:
    below, above = tmp_path / "below", tmp_path / "above"
    make(below, "a.py", "sub/b.py", "empty/", "d/")
    make(above, "sub/", "empty/e/", "new/")
    merged = scan(below, above)
    assert [file.path for file in merged.files] == ["a.py", "sub/b.py"]
    assert merged.empty_directories == ("d", "empty/e", "new")


@pytest.mark.parametrize(
    ("below", "above"),
    [
        ("a", "a/b.py"),
        ("a/b.py", "a"),
        ("a/b/c.py", "a/b"),
        ("x", "x/"),
        ("x", "x/e/"),
        ("x/", "x"),
        ("x/e/", "x"),
    ],
)
def test_an_overlay_file_over_a_directory_is_refused(
    tmp_path: Path, below: str, above: str
) -> None:
    make(tmp_path / "below", below)
    make(tmp_path / "above", above)
    with pytest.raises(
        UsageProblem, match="replaces a file with a directory, or a directory with a file"
    ):
        scan(tmp_path / "below", tmp_path / "above")


def test_a_file_that_a_build_writes_again_with_its_old_time_has_a_new_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SOURCE_DATE_EPOCH, `touch -r` and `rsync --inplace -t`: same size, time and inode."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("kubectl_torchrun.upload.cache._STABLE_AGE", -(10**12))
    directory = tmp_path / "code"
    directory.mkdir()
    digests = []
    for text in ("LR = 0.1", "LR = 9.9"):
        with (directory / "config.py").open("w") as file:
            file.write(text)
        os.utime(directory / "config.py", (1_600_000_000, 1_600_000_000))
        workspace = UploadCache(ClusterNamespace("s", "n"), directory).digest(scan(directory))
        digests.append(workspace.manifest.entries[0].sha256)
    assert digests == [hashlib.sha256(text).hexdigest() for text in (b"LR = 0.1", b"LR = 9.9")]
