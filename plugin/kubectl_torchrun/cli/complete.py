"""Completions of arguments and options, from kubectl."""

import subprocess
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SECONDS = 3.0


def jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of jobs, with their phases."""
    form = "jsonpath={range .items[*]}{.metadata.name}{'\\t'}{.status.phase}{'\\n'}{end}"
    return _items(incomplete, _kubectl(ctx, "get", "torchrunjobs", "-o", form))


def queues(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of queues."""
    form = "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}"
    return _items(incomplete, _kubectl(ctx, "get", "torchrunqueues", "-o", form))


def namespaces(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of namespaces."""
    return _items(
        incomplete,
        _kubectl(
            ctx, "get", "namespaces", "-o", "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}"
        ),
    )


def contexts(ctx: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Names of contexts."""
    return _items(incomplete, _kubectl(ctx, "config", "get-contexts", "-o", "name", here=False))


def _items(incomplete: str, lines: list[str]) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    items = []
    for line in lines:
        name, _, description = line.partition("\t")
        if name.startswith(incomplete):
            items.append(CompletionItem(name, help=description or None))
    return items


def _kubectl(ctx: click.Context, *words: str, here: bool = True) -> list[str]:
    """The lines of kubectl's output; none if it fails or takes longer than _SECONDS."""
    flag_values: dict[str, str] = {}
    at: click.Context | None = ctx
    while at is not None:
        for name in ("kubeconfig", "context", "namespace"):
            flag_values.setdefault(name, at.params.get(name) or "")
            flag_values[name] = flag_values[name] or at.params.get(name) or ""
        at = at.parent
    if not here:
        flag_values = {"kubeconfig": flag_values.get("kubeconfig", "")}
    flags = [f"--{name}={value}" for name, value in flag_values.items() if value]
    command = ["kubectl", *words, *flags, f"--request-timeout={_SECONDS:.0f}s"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines()
