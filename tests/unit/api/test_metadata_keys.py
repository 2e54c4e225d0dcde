"""The reference of labels and annotations has every key, and the components that use it."""

import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from torchrun_api import names
from torchrun_api.generate.metadata_keys import (
    CONTROLLER,
    LAUNCHER,
    METADATA_KEYS,
    PLUGIN,
    SDK,
    page,
)
from torchrun_api.kinds.meta import ChildAnnotations, ChildLabels

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/labels.md"
SOURCES = {
    CONTROLLER: "controller",
    PLUGIN: "plugin",
    LAUNCHER: "runtime/torchrun_runtime/launch",
    SDK: "sdk",
}
# The launcher's generated module names every key that it may read.
GENERATED = ROOT / SOURCES[LAUNCHER] / "contract.py"
KEY = re.compile(r"(torchrun\.ai|app\.kubernetes\.io|batch\.kubernetes\.io)/[a-z0-9-]+")
KEYS = sorted({key.key for key in METADATA_KEYS})


def constants() -> dict[str, str]:
    """Constants of `names` whose values are keys."""
    found = {name: value for name, value in vars(names).items() if name.isupper()}
    keys = {n: v for n, v in found.items() if isinstance(v, str) and KEY.fullmatch(v)}
    del keys["WORKSPACE_AUDIENCE"]
    return {**keys, "JOB_LABEL": names.JOB_LABEL}


@cache
def source(component: str) -> str:
    paths = sorted((ROOT / SOURCES[component]).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path != GENERATED)


def references(key: str) -> list[str]:
    """Patterns of code that uses the key: its constant, its text, or its field of `meta`."""
    patterns = [rf'"{re.escape(key)}"']
    for name in (name for name, value in constants().items() if value == key):
        patterns += [rf"names\.{name}\b", rf"\n    {name},\n", rf"{name}_ANNOTATION\b"]
        # Other modules have constants of the same name.
        patterns.append(rf"from torchrun_api\S* import .*\b{name}\b")
    for place, kind in (("labels", ChildLabels), ("annotations", ChildAnnotations)):
        fields = [f.name for f in msgspec.structs.fields(kind) if f.encode_name == key]
        patterns += [rf"{place}\.{field}\b" for field in fields]
    if key == names.COMPLETION_INDEX_LABEL:
        patterns.append(r"labels\.rank\b")
    return patterns


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make generate"


def test_every_key_of_the_code_is_declared() -> None:
    read = [f for kind in (ChildLabels, ChildAnnotations) for f in msgspec.structs.fields(kind)]
    assert set(KEYS) == set(constants().values()) | {field.encode_name for field in read}


@pytest.mark.parametrize("key", KEYS)
def test_the_components_of_a_key_are_those_whose_code_uses_it(key: str) -> None:
    declared = {
        component
        for one in METADATA_KEYS
        if one.key == key
        for component in (*one.written_by, *one.read_by)
        if component in SOURCES
    }
    using = {
        component
        for component in SOURCES
        if any(re.search(pattern, source(component)) for pattern in references(key))
    }
    assert declared == using
