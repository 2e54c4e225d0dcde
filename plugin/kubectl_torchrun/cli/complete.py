"""What the words of arguments and options are completed with, as kubectl knows it."""

import subprocess
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SECONDS = 3.0


def jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of jobs, with their phases."""
    form = "jsonpath={range .items[*]}{.metadata.name}{'\\t'}{.status.phase}{'\\n'}{end}"
    return _items(incomplete, _ask(ctx, "get", "torchrunjobs", "-o", form))


def queues(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of queues."""
    form = "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}"
    return _items(incomplete, _ask(ctx, "get", "torchrunqueues", "-o", form))


def namespaces(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of namespaces."""
    return _items(
        incomplete,
        _ask(
            ctx, "get", "namespaces", "-o", "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}"
        ),
    )


def contexts(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of contexts."""
    return _items(incomplete, _ask(ctx, "config", "get-contexts", "-o", "name", here=False))


def _items(incomplete: str, lines: list[str]) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    found = []
    for line in lines:
        name, _, said = line.partition("\t")
        if name.startswith(incomplete):
            found.append(CompletionItem(name, help=said or None))
    return found


def _ask(ctx: click.Context, *words: str, here: bool = True) -> list[str]:
    """The lines of kubectl's answer; none where it does not answer at once."""
    given: dict[str, str] = {}
    at: click.Context | None = ctx
    while at is not None:
        for name in ("kubeconfig", "context", "namespace"):
            given.setdefault(name, at.params.get(name) or "")
            given[name] = given[name] or at.params.get(name) or ""
        at = at.parent
    if not here:
        given = {"kubeconfig": given.get("kubeconfig", "")}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    command = ["kubectl", *words, *flags, f"--request-timeout={_SECONDS:.0f}s"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.splitlines()
