"""The pages of the project as data: their links, anchors and code blocks.

A comment on the line above a code block says how it is tested:

    <!-- run: cluster -->          run in the order of the page, on a real cluster (tests/e2e)
    <!-- not run: why -->          by no test, or by a test named here
    <!-- part of: Kind.spec.x -->  YAML below this path of an otherwise complete object

YAML of whole objects and Python need no comment.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
SHELLS = frozenset({"bash", "console"})
TEXTS = frozenset({"", "text", "{toctree}"})
_COMMENT = re.compile(r"<!-- (run|not run|part of): (.+?) -->\s*")
_GENERATED = re.compile(r"[^\w\- ]")


def pages() -> list[Path]:
    """Every page that belongs to the project, except for test data."""
    folders = ("docs", "examples", "bench", "manifests", "cluster", "plugin", "sdk")
    pages = [*ROOT.glob("*.md")]
    for folder in folders:
        pages += (ROOT / folder).rglob("*.md")
    return sorted(page for page in pages if "node_modules" not in page.parts)


@dataclass(frozen=True)
class Block:
    """A fenced code block. `line` counts from 1; `mark` and `argument` are the comment above it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    argument: str = ""

    def __str__(self) -> str:
        """Its page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def script(self) -> str:
        """The commands: in a console block, the lines after a prompt with their continuations."""
        if self.language != "console":
            return self.text
        typed, goes_on = [], False
        for line in self.text.splitlines():
            if line.startswith("$ ") or goes_on:
                typed.append(line.removeprefix("$ "))
                goes_on = line.endswith("\\")
        return "\n".join(typed) + "\n"


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    comment = ("", "")
    for token in _tokens(page):
        if token.type == "html_block":
            match = _COMMENT.fullmatch(token.content)
            comment = (match[1], match[2]) if match else ("", "")
        elif token.type == "fence":
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, *comment)
            comment = ("", "")
        elif token.type != "inline" and not token.type.startswith("list"):
            comment = ("", "")


def links(page: Path) -> Iterator[str]:
    """The targets of links and images, as written."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if isinstance(target, str):
                yield target


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of the headings, as Git servers create them."""
    blocks: list[str] = []
    tokens = _tokens(page)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            children = tokens[at + 1].children or ()
            text = "".join(child.content for child in children)
            slug = _GENERATED.sub("", text.lower()).replace(" ", "-")
            again = blocks.count(slug)
            blocks.append(f"{slug}-{again}" if again else slug)
    return frozenset(blocks)


def broken(page: Path) -> Iterator[str]:
    """The broken links of the page within the project."""
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            yield f"{link}: no such file"
        elif target.is_dir():
            yield f"{link}: a folder; link its README.md or a file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: {target.relative_to(ROOT)} has no such heading"


def plugin_calls(script: str) -> Iterator[list[str]]:
    """The arguments of each call of `kubectl torchrun` in a script, without shell syntax."""
    for line in script.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        call: list[str] = []
        for word in [*reader, ";"]:
            if set(word) <= set("();<>|&"):
                if call[:2] == ["kubectl", "torchrun"]:
                    yield call
                call = []
            elif not (call == [] and "=" in word):
                call.append(word)
