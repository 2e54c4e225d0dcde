"""Writes docs/cli.md and docs/sdk-reference.md from the plugin and the SDK: `make generate`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import torchrun_sdk
from kubectl_torchrun.__main__ import cli

DOCS = Path(__file__).parent
WIDTH = 88  # of a signature on one line
# Flags of nearly every command, which have one table.
COMMON = ("--namespace", "--context", "--kubeconfig", "--color", "--help")
# Methods that build manifests: public for other modules of the SDK.
INTERNAL = frozenset(
    {"claim", "in_pod", "mount", "check", "manifest", "variables", "resolve"}
    | {"node_resources", "head_resources", "resolved_image"}
)
WORDS = {"integer range": "NUMBER", "integer": "NUMBER", "text": "TEXT"}
RUN_BY = "<!-- not run: tests/e2e/test_plugin_examples.py runs the examples of --help -->"


def cli_page() -> str:
    """Every command of the plugin with its help, flags and examples."""
    lines = [
        "# Commands and flags",
        "",
        "Look up a command of `kubectl torchrun` with all of its flags. This page has the text of",
        "`--help`; [the plugin](plugin.md) explains how the commands work together.",
        "",
        "## Flags of all commands",
        "",
        "They are allowed before and after the name of the command.",
        "",
    ]
    with cli.make_context("kubectl torchrun", [], resilient_parsing=True) as context:
        commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    found = {
        option.opts[0]: option
        for command in (cli, *commands)
        if command is not None
        for option in command.params
        if isinstance(option, click.Option)
    }
    lines += flag_table([*(found[name] for name in COMMON if name in found)])
    own = [each for each in cli.params if isinstance(each, click.Option) and is_own(each)]
    lines += ["", "Before the name of the command only:", "", *flag_table(own)]
    for command in commands:
        if command is not None:
            lines += ["", *command_section(command)]
    return "\n".join(lines) + "\n"


def is_own(option: click.Option) -> bool:
    """Whether the flag belongs to its command, and not to all of them."""
    return not option.hidden and option.opts[0] not in COMMON


def command_section(command: click.Command) -> Iterator[str]:
    """The heading, the help, the flags and the examples of a command."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    arguments = (each for each in command.params if isinstance(each, click.Argument))
    usage = " ".join(["kubectl torchrun", str(command.name), *map(argument_name, arguments)])
    yield from (f"## {command.name}", "", f"`{usage}`", "")
    yield escaped(text.strip())
    options = [each for each in command.params if isinstance(each, click.Option) and is_own(each)]
    if options:
        yield ""
        yield from flag_table(options)
    typed = inspect.cleandoc(examples.partition("\n")[2])
    if typed:
        yield from ("", RUN_BY, "```bash", typed, "```")


def argument_name(argument: click.Argument) -> str:
    """An argument as usage lines show it."""
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def flag_table(options: list[click.Option]) -> Iterator[str]:
    """A row for each flag, with its value and its help."""
    yield from ("| flag | value | meaning |", "|---|---|---|")
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        yield f"| {names} | {value_of(option)} | {cell(escaped(option.help or ''))} |"


def value_of(option: click.Option) -> str:
    """What follows the flag; nothing for a switch."""
    if option.is_flag:
        return ""
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    value = option.metavar or "|".join(map(str, choices)) or option.type.name
    return f"`{cell(WORDS.get(value, value))}`"


def cell(text: str) -> str:
    """Text within a table."""
    return text.replace("|", "\\|")


def escaped(text: str) -> str:
    """Help as Markdown: names in angle brackets or with asterisks stay as they are."""
    return re.sub(r"(?<!`)([<>*])(?!`)", r"\\\1", text)


def sdk_page() -> str:
    """Every public name of the SDK with its signature and docstring."""
    lines = [
        "# SDK reference",
        "",
        "Look up a class or a function of `torchrun_sdk` with its parameters. The",
        "[guide](../sdk/README.md) shows how they work together.",
    ]
    errors: list[tuple[str, type]] = []
    others: list[tuple[str, object]] = []
    for name in torchrun_sdk.__all__:
        value = getattr(torchrun_sdk, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            errors.append((name, value))
        else:
            others.append((name, value))
    for name, value in others:
        parts: list[tuple[str, object]]
        if inspect.ismodule(value):
            functions = inspect.getmembers(value, inspect.isfunction)
            parts = [
                (f"{name}.{each}", one) for each, one in functions if is_public(each, one, value)
            ]
        else:
            parts = [(name, value), *methods(name, value)]
        lines += ["", f"## {name}"]
        for path, part in parts:
            lines += ["", "```text", f"{path}{signature(part)}", "```", "", documentation(part)]
    lines += ["", "## Errors", "", "| error | base | when |", "|---|---|---|"]
    for name, error in errors:
        text = cell(" ".join(documentation(error).split()))
        lines.append(f"| `{name}` | `{error.__mro__[1].__name__}` | {text} |")
    return "\n".join(lines) + "\n"


def is_public(name: str, value: object, module: object) -> bool:
    """Whether users call this function of the module."""
    return is_for_users(name) and inspect.getmodule(value) is module


def is_for_users(name: str) -> bool:
    """Whether a name is public and does not belong to the inner workings."""
    return not name.startswith("_") and name not in INTERNAL


def methods(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The methods that users call, in the order of the source."""
    for each, method in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(method) and is_for_users(each):
            yield f"{name}.{each}", method


def signature(value: object) -> str:
    """Its parameters without `self`, one on each line if they are many."""
    assert callable(value)
    found = inspect.signature(value)
    kept = [each for each in found.parameters.values() if each.name != "self"]
    text = str(found.replace(parameters=kept)).replace("= Ellipsis", "= ...")
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text).removesuffix(" -> None")
    if len(text) <= WIDTH:
        return text
    parts = re.split(r", (?=\*|\w+: )", text[1 : text.rindex(")")])
    rest = text[text.rindex(")") :]
    return "(\n" + "".join(f"    {part},\n" for part in parts) + rest


def documentation(value: object) -> str:
    """The docstring."""
    return inspect.getdoc(value) or ""


def pages() -> dict[Path, str]:
    """The files and their contents."""
    return {DOCS / "cli.md": cli_page(), DOCS / "sdk-reference.md": sdk_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
