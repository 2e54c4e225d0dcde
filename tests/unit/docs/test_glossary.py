"""The glossary of docs/design.md is short and names the code, and a class name means one thing."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from pages import ROOT

PAGE = ROOT / "docs" / "design.md"
PACKAGES = ("api", "controller", "runtime", "plugin", "sdk")
MOST_TERMS = 40

# What only a machine can be. A node is a pod of a job; the launchers speak of "node 3".
OF_MACHINES = (
    r"lost nodes?\b(?! \d)",
    r"nodes? (is|are) (lost|NotReady|cordoned|not ready)",
    r"node (returns|restarts|restarted)\b",
    r"(empty|Ready|schedulable|cordoned) nodes?\b",
    r"nodes? that (is|are) (not )?(ready|Ready|cordoned)",
    r"read the nodes\b",
    r"Kubernetes nodes?\b",
    r"mounted on one node\b",
    r"\bnode node-",
    r"the (pod|worker)'s node\b",
)
PAGES = ("README.md", "ARCHITECTURE.md", "docs/*.md", "docs/terminal.svg", "manifests/**/*.yaml")


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


def test_no_two_public_classes_share_a_name() -> None:
    shared = {name: count for name, count in class_names().items() if count > 1}
    assert shared == {}, "choose another name"


def test_a_machine_is_not_called_a_node() -> None:
    rule = re.compile("|".join(OF_MACHINES).replace(" ", r"\s+"))
    pages = {pattern: list(ROOT.glob(pattern)) for pattern in PAGES}
    assert all(pages.values()), "a pattern finds no files"
    paths = [*modules(), *chain.from_iterable(pages.values())]
    found = {
        f"{path.relative_to(ROOT)}: {' '.join(match[0].split())}"
        for path in paths
        for match in rule.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "say machine, see the glossary"
