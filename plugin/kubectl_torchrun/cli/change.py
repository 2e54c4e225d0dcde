"""scale, suspend, resume and cancel: what becomes of a run."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import click

from kubectl_torchrun.cli import complete, options

if TYPE_CHECKING:
    from kubectl_torchrun.cluster.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


class Asked(NamedTuple):
    """What the commands that change jobs have in common; `where` is the cluster."""

    wait: str
    timeout: float | None
    dry_run: str
    output: str
    where: options.Where


def _changes(bare: str, *formats: str) -> Callable[[options.Work], options.Work]:
    """--wait, --timeout, --dry-run, -o and the cluster's flags, given as one `asked: Asked`.

    bare: what --wait means alone; formats: of -o.
    """

    def add(command: options.Work) -> options.Work:
        @functools.wraps(command)
        def wrapped(**given: object) -> None:
            asked = Asked(*(given.pop(name) for name in Asked._fields))  # type: ignore[arg-type]
            command(asked=asked, **given)

        result = options.output_option(*formats)(options.cluster_options(wrapped))
        return options.wait_options(bare)(options.dry_run_option(result))

    return add


@click.command(cls=options.Command, short_help="Pause a job, keep its claims")
@options.job_argument
@_changes("Suspended", "name", "yaml", "json")
def suspend(job: str, asked: Asked) -> None:
    """Pause JOB: ranks get SIGTERM and a grace period, then all but the claims is freed.

    \b
    Examples:
      kubectl torchrun suspend my-project-x7k2p
      kubectl torchrun suspend my-project-x7k2p --wait --timeout 5m
    """
    _change("suspend", job, None, asked)


@click.command(cls=options.Command, short_help="Let a paused job go on")
@options.job_argument
@_changes("Running", "name", "yaml", "json")
def resume(job: str, asked: Asked) -> None:
    """Let JOB go on after a pause, as a new gang on the same workspace.

    \b
    Examples:
      kubectl torchrun resume my-project-x7k2p
      kubectl torchrun resume my-project-x7k2p --wait=Running
    """
    _change("resume", job, None, asked)


@click.command(cls=options.Command, short_help="Give a job another number of nodes")
@options.job_argument
@click.option("--nodes", required=True, type=click.IntRange(min=1), help="How many nodes.")
@_changes("Running", "name", "yaml", "json")
def scale(job: str, nodes: int, asked: Asked) -> None:
    """Give JOB another number of nodes: an elastic one while it runs, any one before it starts.

    A running job goes on from its checkpoint as a new gang, which is not counted as a restart.

    \b
    Examples:
      kubectl torchrun scale my-project-x7k2p --nodes 4
      kubectl torchrun scale my-project-x7k2p --nodes 4 --dry-run
    """
    _change("scale", job, nodes, asked)


def _change(verb: str, job: str, nodes: int | None, asked: Asked) -> None:
    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import lifecycle

        return lifecycle.change(target, verb, job, nodes, lifecycle.Options(*asked[:4]), terminal)

    options.run(work, asked.where, "; what was asked for is done by the controller all the same")


@click.command(cls=options.Command, short_help="Delete jobs")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete.jobs)
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Only a terminal is asked at all.")
@_changes("Deleted", "name")
def cancel(jobs: tuple[str, ...], yes: bool, asked: Asked) -> None:
    """Delete JOBs with their pods and claims; retained claims, as checkpoints are, stay.

    A name without a job costs the others nothing; the exit code is 1 then.

    \b
    Examples:
      kubectl torchrun cancel my-project-x7k2p
      kubectl torchrun cancel my-project-x7k2p other-run --yes --wait --timeout 2m
    """
    if asked.wait not in ("", "Deleted", "deleted"):
        raise click.UsageError("cancel can wait for one thing: --wait=Deleted.")

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun.commands import lifecycle

        return lifecycle.cancel(target, jobs, lifecycle.Options(*asked[:4]), terminal, sure=yes)

    options.run(work, asked.where, "; what is said to be deleted above is, the rest is as it was")


COMMANDS = (scale, suspend, resume, cancel)
