"""Completion, by kubectl's own mechanism: it runs kubectl_complete-torchrun with the words so far.

The answer is a line for each completion, `value<TAB>description`, and at last a colon with cobra's
directive. https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins
"""

import subprocess
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SECONDS = 3.0
_NO_FILES = 4
_FILES = 0


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


def main() -> None:
    """Entry point of kubectl_complete-torchrun."""
    from click.shell_completion import ShellComplete

    from kubectl_torchrun.__main__ import cli

    *words, incomplete = sys.argv[1:] or [""]
    completer = ShellComplete(cli, {}, "kubectl torchrun", "")
    directive = _NO_FILES
    for item in completer.get_completions(words, incomplete):
        if item.type in ("file", "dir"):
            directive = _FILES
            continue
        said = " ".join((item.help or "").split())
        print(f"{item.value}\t{said}" if said else item.value)
    print(f":{directive}")
