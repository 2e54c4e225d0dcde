"""The ignore rules, compared with git."""

import itertools
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kubectl_torchrun.upload import gitignore
from profiles import examples

NAMES = ("a", "b", "foo", "foo.py", "src", "keep", "a b", "é", "[x]", "a-b")
PATHS = [f"{x}/{y}/{z}" for x in NAMES for y in NAMES for z in ("a", "foo.py", "[x]")]

# fmt: off
ATOMS = st.sampled_from([
    "a", "b", "foo", "src", "keep", ".py", "é", " ", "-", "x",
    "*", "**", "***", "?", "[ab]", "[!a]", "[^/]", "[a-f]", "[z-a]", "[b-a]", "[]-a]", "[a\\]b]",
    "[[:alpha:]]", "[[:bogus:]]", "\\*", "\\", "[", "]",
])
# fmt: on
SEGMENTS = st.lists(ATOMS, min_size=1, max_size=3).map("".join)
LINES = st.builds(
    lambda negated, lead, segments, tail, blank: negated + lead + "/".join(segments) + tail + blank,
    st.sampled_from(["", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(SEGMENTS, min_size=1, max_size=3),
    st.sampled_from(["", "/"]),
    st.sampled_from(["", "", "", " ", "\\ ", "\r"]),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", root], check=True)
    for path in PATHS:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


SHORT = ("a", "b", "ab", "aab", "abab")
DEEP = [
    "/".join(names) for depth in (1, 2, 3, 4) for names in itertools.product(SHORT, repeat=depth)
]


def kept_by_git(root: Path) -> set[str]:
    command = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(root), "ls-files"]
    flags = ["--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run([*command, *flags], capture_output=True, check=True).stdout.decode()
    return {path for path in listed.split("\0") if path and path != ".gitignore"}


def kept_by_rules(text: str) -> set[str]:
    rules = gitignore.parse(text.split("\n"))

    def ignored(path: str) -> bool:
        parts = path.split("/")
        return any(
            rules.match("/".join(parts[:depth]), directory=depth < len(parts))
            for depth in range(1, len(parts) + 1)
        )

    return {path for path in PATHS if not ignored(path)}


@pytest.mark.long
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(LINES, min_size=1, max_size=3))
def test_the_same_files_are_included_as_by_git(repository: Path, lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    (repository / ".gitignore").write_bytes(text.encode())
    assert kept_by_rules(text) == kept_by_git(repository)


@pytest.mark.parametrize(
    ("lines", "path", "directory", "verdict"),
    [
        (["data/", "!data/"], "data", True, False),
        (["data/"], "data", False, None),
        (["/data"], "x/data", False, None),
        (["*.log", "!keep.log"], "x/keep.log", False, False),
        (["#x", "\\#x"], "#x", False, True),
        (["a/**/b"], "a/b", False, True),
        (["a/**"], "a", True, None),
        (["foo "], "foo", False, True),
        (["foo\\ "], "foo ", False, True),
        (["["], "[", False, None),
    ],
)
def test_included_and_ignored_paths(
    lines: list[str], path: str, directory: bool, verdict: bool | None
) -> None:
    assert gitignore.parse(lines).match(path, directory=directory) is verdict


def test_byte_order_marks_and_windows_line_ends_are_stripped(tmp_path: Path) -> None:
    file = tmp_path / ".gitignore"
    file.write_bytes(b"\xef\xbb\xbf*.log\r\n*.tmp\r\n")
    rules = gitignore.read(file)
    assert rules.match("a.log", directory=False)
    assert rules.match("a.tmp", directory=False)


def test_no_file_means_no_rules(tmp_path: Path) -> None:
    assert gitignore.read(tmp_path / ".gitignore").rules == ()


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a*a*a*a*a*a*a*a*a*a*a*a*b", "a" * 250),
        ("**/" * 20 + "x", "/".join("a" * 100)),
        ("/".join(["**/*a*a*a*a*b"] * 6), "/".join(["a" * 60] * 30)),
    ],
)
def test_a_hostile_pattern_takes_linear_time(pattern: str, path: str) -> None:
    """A backtracking match would run for years on each of these patterns."""
    rules = gitignore.parse([pattern])
    started = time.process_time()
    assert rules.match(path, directory=False) is None
    assert time.process_time() - started < 2


WILD = st.lists(st.sampled_from(["a", "b", "*", "?", "**/", "/", "[ab]"]), min_size=3, max_size=9)


@examples(300)
@given(WILD.map("".join))
def test_the_bounded_match_equals_a_backtracking_match(pattern: str) -> None:
    bounded = gitignore.parse([pattern])
    with mock.patch.object(gitignore, "_bounded", "".join):
        backtracking = gitignore.parse([pattern])
    for path in DEEP:
        verdicts = [rules.match(path, directory=True) for rules in (bounded, backtracking)]
        assert verdicts[0] is verdicts[1], path
