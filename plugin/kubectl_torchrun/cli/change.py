"""scale, suspend, resume and cancel: what becomes of a run."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli import base, complete

if TYPE_CHECKING:
    from kubectl_torchrun.kubectl import Target
    from kubectl_torchrun.terminal import Terminal


@click.command(cls=base.Command, short_help="Pause a job, keep its claims")
@base.job_argument
@base.wait_options("Suspended")
@base.dry_run_option
@base.output_option("name", "yaml", "json")
@base.cluster_options
def suspend(
    job: str, wait: str, timeout: float | None, dry_run: str, output: str, where: base.Where
) -> None:
    """Pause JOB: ranks get SIGTERM and a grace period, then all but the claims is freed.

    \b
    Examples:
      kubectl torchrun suspend my-project-x7k2p
      kubectl torchrun suspend my-project-x7k2p --wait --timeout 5m
    """
    _change("suspend", job, None, wait, timeout, dry_run, output, where)


@click.command(cls=base.Command, short_help="Let a paused job go on")
@base.job_argument
@base.wait_options("Running")
@base.dry_run_option
@base.output_option("name", "yaml", "json")
@base.cluster_options
def resume(
    job: str, wait: str, timeout: float | None, dry_run: str, output: str, where: base.Where
) -> None:
    """Let JOB go on after a pause, as a new gang on the same workspace.

    \b
    Examples:
      kubectl torchrun resume my-project-x7k2p
      kubectl torchrun resume my-project-x7k2p --wait=Running
    """
    _change("resume", job, None, wait, timeout, dry_run, output, where)


@click.command(cls=base.Command, short_help="Give a job another number of nodes")
@base.job_argument
@click.option("--nodes", required=True, type=click.IntRange(min=1), help="How many nodes.")
@base.wait_options("Running")
@base.dry_run_option
@base.output_option("name", "yaml", "json")
@base.cluster_options
def scale(
    job: str,
    nodes: int,
    wait: str,
    timeout: float | None,
    dry_run: str,
    output: str,
    where: base.Where,
) -> None:
    """Give JOB another number of nodes: an elastic one while it runs, any one before it starts.

    A running job goes on from its checkpoint as a new gang, which is not counted as a restart.

    \b
    Examples:
      kubectl torchrun scale my-project-x7k2p --nodes 4
      kubectl torchrun scale my-project-x7k2p --nodes 4 --dry-run
    """
    _change("scale", job, nodes, wait, timeout, dry_run, output, where)


def _change(
    verb: str,
    job: str,
    nodes: int | None,
    wait: str,
    timeout: float | None,
    dry_run: str,
    output: str,
    where: base.Where,
) -> None:
    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import life

        options = life.Options(wait, timeout, dry_run, output)
        return life.change(target, verb, job, nodes, options, terminal)

    base.run(work, where, "; what was asked for is done by the controller all the same")


@click.command(cls=base.Command, short_help="Delete jobs")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete.jobs)
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Only a terminal is asked at all.")
@base.wait_options("Deleted")
@base.dry_run_option
@base.output_option("name")
@base.cluster_options
def cancel(
    jobs: tuple[str, ...],
    yes: bool,
    wait: str,
    timeout: float | None,
    dry_run: str,
    output: str,
    where: base.Where,
) -> None:
    """Delete JOBs with their pods and claims; retained claims, as checkpoints are, stay.

    \b
    Examples:
      kubectl torchrun cancel my-project-x7k2p
      kubectl torchrun cancel my-project-x7k2p other-run --yes --wait --timeout 2m
    """
    if wait not in ("", "Deleted", "deleted"):
        raise click.UsageError("cancel can wait for one thing: --wait=Deleted.")

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import life

        options = life.Options(wait, timeout, dry_run, output)
        return life.cancel(target, jobs, options, terminal, sure=yes)

    base.run(work, where, "; what is said to be deleted above is, the rest is as it was")


COMMANDS = (scale, suspend, resume, cancel)
