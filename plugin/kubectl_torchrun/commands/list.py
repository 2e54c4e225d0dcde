"""`list`: a table of jobs."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import complete
from kubectl_torchrun.cli.options import (
    Command,
    check_watch,
    cluster_options,
    output_option,
    run_command,
    watch_option,
)
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.phases import NEW, list_phases
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Phase(click.ParamType["str"]):
    """A phase, in any case."""

    name = "phase"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The phase as it is spelled in a status."""
        phases = {phase.lower(): phase for phase in list_phases()}
        phase = phases.get(str(value).lower())
        if phase is None:
            valid = ", ".join(phases.values())
            self.fail(f"Unknown phase {value}. Valid phases: {valid}.", param, ctx)
        return phase

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        """The phases that start with the word."""
        from click.shell_completion import CompletionItem

        prefix = incomplete.lower()
        return [CompletionItem(p) for p in list_phases() if p.lower().startswith(prefix)]


@click.command("list", cls=Command)
@click.option("--all-namespaces", "-A", is_flag=True, help="List jobs of all namespaces.")
@click.option("--selector", "-l", default="", metavar="K=V", help="Only jobs with these labels.")
@click.option(
    "--queue", "-q", default="", help="Only jobs of this queue.", shell_complete=complete.queues
)
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=_Phase(),
    metavar="PHASE",
    help="Only jobs in this phase, in any case; repeatable.",
)
@watch_option
@output_option("name", "wide", "yaml", "json")
@cluster_options
def command(
    all_namespaces: bool,
    selector: str,
    queue: str,
    phases: tuple[str, ...],
    watch: bool,
    output: str,
    target: Target,
) -> None:
    """List jobs with queue, nodes, phase, progress, age and reason. The newest job is last.

    \b
    Examples:
      kubectl torchrun list
      kubectl torchrun list -A --phase running --phase queued
      kubectl torchrun list --watch
      kubectl torchrun list -o wide
      kubectl torchrun list --queue gpu -o name
    """
    check_watch(watch, output)

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.job_list import JobFilter, print_jobs

        selected = frozenset("" if phase == NEW else phase for phase in phases)
        job_filter = JobFilter(all_namespaces, selector, queue, selected)
        return print_jobs(target, job_filter, output, terminal, watch=watch)

    run_command(work)
