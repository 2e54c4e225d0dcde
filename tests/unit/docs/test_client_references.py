"""The references of the plugin and the SDK are those that the code has, with every flag and name."""

from pathlib import Path

import click
import client_references
import pytest

import torchrun_sdk
from kubectl_torchrun.__main__ import cli

PAGES = client_references.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_reference_is_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == PAGES[page], "run make generate"


def test_every_flag_is_in_the_reference() -> None:
    text = client_references.cli_page()
    with cli.make_context("kubectl torchrun", [], resilient_parsing=True) as context:
        commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    flags = {
        name
        for command in commands
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
        for name in option.opts
    }
    assert len(flags) > 40
    assert {flag for flag in flags if f"`{flag}`" not in text} == set()


def test_every_public_name_of_the_sdk_is_in_the_reference() -> None:
    text = client_references.sdk_page()
    assert {name for name in torchrun_sdk.__all__ if name not in text} == set()
