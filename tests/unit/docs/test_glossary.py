"""The glossary of docs/design.md is short and names the code, and a class name means one thing."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pages import ROOT

PAGE = ROOT / "docs" / "design.md"
PACKAGES = ("api", "controller", "runtime", "plugin", "sdk")
MOST_TERMS = 40
# Public classes that share a name, with the number of definitions. Entries may only shrink: rename a
# class, then lower or remove its entry.
SHARED_NAMES = {
    "ApiError": 2,
    "Backoff": 2,
    "Cause": 4,
    "Credentials": 2,
    "Done": 2,
    "Endpoint": 2,
    "Entry": 2,
    "Failure": 2,
    "Gang": 2,
    "Job": 2,
    "Limits": 4,
    "Line": 2,
    "Lines": 3,
    "Object": 2,
    "Observer": 2,
    "Place": 3,
    "Queue": 2,
    "Refused": 2,
    "Reload": 2,
    "Report": 2,
    "Response": 2,
    "Rule": 2,
    "Server": 3,
    "Settings": 4,
    "Snapshot": 2,
    "State": 2,
    "SupersededError": 2,
    "SyncMessage": 2,
    "Terminal": 2,
    "Tree": 3,
    "UnavailableError": 2,
    "Upload": 2,
    "View": 2,
    "Wait": 3,
    "Worker": 3,
    "Workspace": 2,
    "Writes": 2,
}


@cache
def modules() -> dict[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def glossary() -> str:
    return PAGE.read_text(encoding="utf-8").partition("\n## Glossary\n")[2]


def terms() -> list[tuple[str, str]]:
    """Each term with its name in the code."""
    return re.findall(r"^\| ([^|]+) \| `(\w+)` \| [^|]+ \|$", glossary(), re.MULTILINE)


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """Classes, functions and variables of a module or class, and the fields of its classes."""
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=fields):
                yield name
                yield from names_in(fields)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def public_names() -> set[str]:
    names = {part for path in modules() for part in path.with_suffix("").parts}
    names |= {name for module in modules().values() for name in names_in(module.body)}
    return {name for name in names if not name.startswith("_")}


def class_names() -> Counter[str]:
    return Counter(
        node.name
        for module in modules().values()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def test_the_glossary_is_short_and_in_order() -> None:
    names = [term for term, _ in terms()]
    assert 20 <= len(names) <= MOST_TERMS
    assert names == sorted(set(names), key=str.lower)
    rows = re.findall(r"^\| (?!---)", glossary(), re.MULTILINE)
    assert len(rows) == len(names) + 1, "a row has another form"


def test_terms_are_names_in_the_code() -> None:
    assert {name for _, name in terms()} - public_names() == set()


def test_no_new_class_takes_a_name_in_use() -> None:
    shared = {name: count for name, count in class_names().items() if count > 1}
    grown = {name: count for name, count in shared.items() if count > SHARED_NAMES.get(name, 1)}
    assert grown == {}, "choose another name"


def test_the_shared_names_are_up_to_date() -> None:
    counts = class_names()
    stale = {name: counts[name] for name, limit in SHARED_NAMES.items() if counts[name] < limit}
    assert stale == {}, "lower or remove these entries of SHARED_NAMES"
