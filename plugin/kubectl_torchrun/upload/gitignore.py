"""Git's ignore rules: https://git-scm.com/docs/gitignore, checked against git itself in the tests.

No package fits: the walk checks level by level, as git does. For the pattern `a/**`, pathspec 1.1
ignores the directory `a`, so that a later `!a/x` has no effect, and its expressions backtrack:
`*a*a*a*a*a*a*a*a*a*b` takes 6 s for 40 letters.
"""

import os
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "\\x21-\\x7e",
    "lower": "a-z",
    "print": "\\x20-\\x7e",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}

_IN_NAME, _DIRECTORIES, _REST = "[^/]*", "(?:.*/)?", ".*"


class IgnoreRule(NamedTuple):
    """One line of an ignore file. `anchored`: matched with the path, else with the last name."""

    regex: re.Pattern[str]
    anchored: bool
    directories_only: bool
    ignore: bool


class IgnoreFile(NamedTuple):
    """The rules of one file. Paths are relative to its directory."""

    rules: tuple[IgnoreRule, ...]

    def match(self, path: str, *, directory: bool) -> bool | None:
        """True: ignored. False: included again by a `!` line. None: no line matches the path.

        The path has `/` between its parts and none at its end. Parents are not checked, because a
        walk does not descend into an ignored directory.
        """
        text = _as_bytes(path)
        name = text.rpartition("/")[2]
        for rule in reversed(self.rules):
            if rule.directories_only and not directory:
                continue
            if rule.regex.fullmatch(text if rule.anchored else name):
                return rule.ignore
        return None


def read(path: Path) -> IgnoreFile:
    """The rules of the file; empty if it does not exist. Raises OSError if unreadable."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return IgnoreFile(())
    return parse(os.fsdecode(text.removeprefix(b"\xef\xbb\xbf")).split("\n"))


def parse(lines: Iterable[str]) -> IgnoreFile:
    """Rules of these lines, without comments, blank lines and malformed patterns, as in git."""
    rules = (_rule(line) for line in lines)
    return IgnoreFile(tuple(rule for rule in rules if rule is not None))


def _rule(line: str) -> IgnoreRule | None:
    line = line.removesuffix("\r")
    if line.startswith("#"):
        return None
    pattern = _without_trailing_spaces(line)
    ignore = not pattern.startswith("!")
    pattern = pattern if ignore else pattern[1:]
    directories_only = pattern.endswith("/")
    pattern = pattern.removesuffix("/")
    anchored = "/" in pattern
    pattern = pattern.removeprefix("/")
    if not pattern:
        return None
    regex = _translate(_as_bytes(pattern), anchored=anchored)
    if regex is None:
        return None
    return IgnoreRule(re.compile(regex, re.DOTALL), anchored, directories_only, ignore)


def _without_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    escaped_space = backslashes % 2 == 1 and len(stripped) < len(line)
    return stripped + " " if escaped_space else stripped


def _as_bytes(text: str) -> str:
    """One character for each byte, because `?` and brackets of git match bytes."""
    return os.fsencode(text).decode("latin-1")


def _translate(pattern: str, *, anchored: bool) -> str | None:
    out: list[str] = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "*":
            end = position
            while end < len(pattern) and pattern[end] == "*":
                end += 1
            part, position = _stars(pattern, position, end, anchored=anchored)
        elif character == "?":
            part, position = "[^/]", position + 1
        elif character == "[":
            bracket = _bracket(pattern, position + 1)
            if bracket is None:
                return None
            part, position = bracket
        elif character == "\\":
            if position + 1 == len(pattern):
                return None
            part, position = re.escape(pattern[position + 1]), position + 2
        else:
            part, position = re.escape(character), position + 1
        out.append(part)
    return _bounded(out)


def _bounded(parts: list[str]) -> str:
    """The parts as one regular expression that never takes more than quadratic time.

    The first match of a piece between two wildcards is as good as any other, because a wildcard of
    the same kind follows. So the engine need not try others (`(?>`).
    """
    total = len(parts)
    at = [number for number, part in enumerate(parts) if part in (_DIRECTORIES, _REST)]
    out = [_bounded_names(parts[: at[0] if at else total])]
    for number, end in pairwise([*at, total]):
        block = _bounded_names(parts[number + 1 : end])
        last = end == total
        out.append(parts[number] + block if last else f"(?>(?:.*?/)??{block})")
    return "".join(out)


def _bounded_names(parts: list[str]) -> str:
    """The same for parts whose only wildcards match within one name."""
    total = len(parts)
    at = [number for number, part in enumerate(parts) if part == _IN_NAME]
    out = parts[: at[0] if at else total]
    for number, end in pairwise([*at, total]):
        piece = parts[number + 1 : end]
        # A piece with a slash matches at one position only.
        once = end != total and "/" not in piece
        out += ["(?>[^/]*?", *piece, ")"] if once else [_IN_NAME, *piece]
    return "".join(out)


def _stars(pattern: str, start: int, end: int, *, anchored: bool) -> tuple[str, int]:
    """`**` matches any directories if it is a whole part of the path; otherwise it is like `*`."""
    # git removes the literal start of a pattern first, so `**` of `a**/b` is a whole part.
    starts = pattern[:start].endswith("/") or not set(pattern[:start]) & set("*?[\\")
    whole = starts and pattern[end : end + 1] in ("", "/")
    if end - start == 1 or not (anchored and whole):
        return _IN_NAME, end
    if end == len(pattern):
        return _REST, end
    return _DIRECTORIES, end + 1


def _bracket(pattern: str, position: int) -> tuple[str, int] | None:
    """The set that starts after `[`, with the position after its `]`; None if it is malformed."""
    negated = pattern[position : position + 1] in ("!", "^")
    position += negated
    first = True
    items: list[str] = []
    while True:
        if position >= len(pattern):
            return None
        if pattern[position] == "]" and not first:
            break
        first = False
        if pattern.startswith("[:", position):
            name, closed, _ = pattern[position + 2 :].partition(":]")
            if closed and name not in _CLASSES:
                return None
            if closed:
                items.append(_CLASSES[name])
                position += len(name) + 4
                continue
        low, position = _member(pattern, position)
        high = low
        if pattern[position : position + 1] == "-" and pattern[position + 1 : position + 2] not in (
            "",
            "]",
        ):
            high, position = _member(pattern, position + 1)
        if low is None or high is None:
            return None
        # git compares the first character before it sees that a range follows.
        items.append(f"{re.escape(low)}-{re.escape(high if low <= high else low)}")
    members = "".join(items)
    if negated:
        return f"[^/{members}]", position + 1
    return (f"(?!/)[{members}]" if members else "(?!)"), position + 1


def _member(pattern: str, position: int) -> tuple[str | None, int]:
    if pattern[position] != "\\":
        return pattern[position], position + 1
    if position + 1 >= len(pattern):
        return None, position + 1
    return pattern[position + 1], position + 2
