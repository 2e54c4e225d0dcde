"""Links between pages have targets, and every code block is tested or has a reason."""

import tomllib
from pathlib import Path

import pytest
import yaml

from kubectl_torchrun.__main__ import cli
from pages import ROOT, SHELLS, TEXTS, Block, blocks, broken, links, pages, plugin_calls

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert list(broken(page)) == []


def test_every_page_is_linked_from_the_index() -> None:
    reached, new = set(), {ROOT / "docs" / "index.md", ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        new |= targets & set(PAGES) - reached
    assert set(PAGES) <= reached


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_has_a_reason(block: Block) -> None:
    if block.language in SHELLS:
        assert block.mark in ("run", "not run"), (
            f"{block}: above it, `<!-- run: cluster -->` or `<!-- not run: why -->`"
        )
        assert block.mark != "run" or block.argument == "cluster", f"{block}: {block.argument}"
    elif block.language == "yaml":
        whole = all("apiVersion" in body for body in yaml.safe_load_all(block.text) if body)
        assert whole or block.mark in ("part of", "not run"), (
            f"{block}: above it, `<!-- part of: Kind.path -->` or `<!-- not run: why -->`"
        )
    else:
        assert block.language in {"python", "toml", "json", *TEXTS}, f"{block}: {block.language}"


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_toml(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", of(*SHELLS), ids=str)
def test_calls_of_the_plugin_parse(block: Block) -> None:
    for words in plugin_calls(block.script()):
        if "--help" in words:
            continue
        with cli.make_context("kubectl torchrun", words[2:]) as outer:
            name, command, rest = cli.resolve_command(outer, [*outer._protected_args, *outer.args])
            assert command is not None
            command.make_context(name, rest, parent=outer)


def test_calls_are_found_in_shell_syntax() -> None:
    script = 'job=$(kubectl torchrun list -o name | head -1) && A=b kubectl torchrun \\\n  logs "$job" > x # y'
    assert list(plugin_calls(script)) == [
        ["kubectl", "torchrun", "list", "-o", "name"],
        ["kubectl", "torchrun", "logs", "$job"],
    ]
    assert sum(1 for block in of(*SHELLS) for _ in plugin_calls(block.script())) > 30
