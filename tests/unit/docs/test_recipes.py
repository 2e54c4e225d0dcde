"""The code of docs/recipes.md is that of the scripts, in the same order."""

import textwrap

import pytest

from pages import ROOT, blocks

PAGE = ROOT / "docs" / "recipes.md"
SCRIPTS = sorted((ROOT / "examples" / "recipes").glob("train_*.py"))


# The parts of each Python block, which `...` separates.
EXCERPTS = [
    [part.strip("\n") for part in block.text.split("...\n")]
    for block in blocks(PAGE)
    if block.language == "python"
]


def has(script: str, part: str) -> bool:
    """Whether the lines stand in the script, at any indentation."""
    return any(f"\n{textwrap.indent(part, ' ' * indent)}" in script for indent in range(0, 20, 4))


@pytest.mark.parametrize("parts", EXCERPTS, ids=lambda parts: parts[0].split("\n")[0])
def test_an_excerpt_is_of_one_script(parts: list[str]) -> None:
    assert [one for one in SCRIPTS if all(has(one.read_text(), part) for part in parts)] != []


def test_the_page_shows_every_script() -> None:
    assert len(EXCERPTS) == len(SCRIPTS) == 7
    for script in SCRIPTS:
        assert f"](../examples/recipes/{script.name})" in PAGE.read_text()
        lines = script.read_text().splitlines()
        assert 30 <= len(lines) <= 110, script.name
