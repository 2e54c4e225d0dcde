"""kubectl torchrun: the commands and their help."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from kubectl_torchrun.kubectl import Target
    from kubectl_torchrun.terminal import Terminal

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_CODES = """\b
Exit codes:
  0    the run succeeded (without --follow: the workspace is uploaded)
  1    the run failed, or the job was deleted
  2    the command cannot be carried out as given; nothing was created
  3    the job exists, its workspace was not uploaded
  4    the cluster was not reached, or it refused
  130  stopped by Ctrl-C; the job goes on
"""


def _cluster_options(command: Callable[P, R]) -> Callable[P, R]:
    for option in (
        click.option("--kubeconfig", default="", metavar="FILE", help="As for kubectl."),
        click.option("--context", default="", metavar="NAME", help="As for kubectl."),
        click.option("--namespace", "-n", default="", metavar="NS", help="As for kubectl."),
    ):
        command = option(command)
    return command


_wait_option = click.option(
    "--wait",
    type=click.FloatRange(min=1),
    default=1800,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the pod that takes the upload.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kubectl-torchrun", prog_name="kubectl torchrun")
def cli() -> None:
    """Run the code in the current directory with torchrun on many nodes of a cluster.

    \b
    Example:
      cd my-project
      kubectl torchrun submit --gpus 16 "python train.py --epochs 10"
    """


class _Submit(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options of the user's own command are the usual surprise here."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} If it belongs to your command, quote the command"
                ' ("python train.py --epochs 3") or put -- before it.',
                ctx,
            ) from error


@cli.command(cls=_Submit, epilog=_EXIT_CODES)
@click.argument("command", nargs=-1, required=True)
@click.option("--queue", "-q", default="", help="TorchrunQueue. Default: the only one there is.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes, each with the queue's resources.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs in all, spread evenly over nodes.")
@click.option(
    "--name", default="", help="Name of the job. Default: the directory's, and 5 letters."
)
@click.option("--image", default="", help="Image to run in. Default: the queue's.")
@click.option("--env", "-e", multiple=True, metavar="K=V", help="Environment variable; repeatable.")
@click.option("--follow/--no-follow", default=None, help="Follow the run to its end (the default).")
@click.option("--dry-run", is_flag=True, help="Have the cluster judge the job and print it only.")
@click.option(
    "--output",
    "-o",
    default="",
    type=click.Choice(["", "name", "yaml", "json"]),
    metavar="name|yaml|json",
    help="Print the job on stdout; implies --no-follow.",
)
@_wait_option
@_cluster_options
def submit(
    command: tuple[str, ...],
    queue: str,
    nodes: int | None,
    gpus: int | None,
    name: str,
    image: str,
    env: tuple[str, ...],
    follow: bool | None,
    dry_run: bool,
    output: str,
    wait: float,
    kubeconfig: str,
    context: str,
    namespace: str,
) -> None:
    """Send the current directory and run COMMAND in it on one or more nodes.

    Left out are .git, what .gitignore and .torchrunignore name, and likely secrets. COMMAND is a
    shell line; a plain `python ...` line runs under torchrun on every node.

    \b
    Examples:
      kubectl torchrun submit --gpus 8 "python train.py --epochs 10"
      kubectl torchrun submit --queue dev --nodes 2 -e LR=0.1 -- python train.py --epochs 10
      kubectl torchrun submit --dry-run "python train.py" > job.yaml
    """
    if nodes and gpus:
        raise click.UsageError("Give --nodes or --gpus, not both: either one decides the other.")
    if follow and (output or dry_run):
        raise click.UsageError("--follow prints logs where -o or --dry-run prints the job: choose.")
    line = command[0] if len(command) == 1 else shlex.join(command)
    if not line.strip():
        raise click.UsageError('COMMAND is empty; give it as in "python train.py".')

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import commands
        from kubectl_torchrun.manifest import Request, variables

        request = Request(name, queue, line, nodes, gpus, image, variables(env))
        following = not output if follow is None else follow
        options = commands.SubmitOptions(Path.cwd(), following, dry_run, output, wait)
        return commands.submit(target, request, options, terminal)

    _run(work, kubeconfig, context, namespace, "; nothing was created")


@cli.command()
@click.argument("job")
@click.argument("directory", default=".", type=click.Path(exists=True, file_okay=False))
@_wait_option
@_cluster_options
def sync(
    job: str, directory: str, wait: float, kubeconfig: str, context: str, namespace: str
) -> None:
    """Send DIRECTORY (default: the current one) to JOB, which waits for its workspace.

    Goes on where an upload was broken off. If the directory has changed since `submit`, the job
    takes it as it is now.

    \b
    Example:
      kubectl torchrun sync my-project-x7k2p
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import commands

        return commands.sync(target, job, Path(directory), wait, terminal)

    _run(work, kubeconfig, context, namespace)


@cli.command()
@click.argument("job")
@click.option(
    "--follow", "-f", is_flag=True, help="Go on until the run ends; exit with its result."
)
@click.option(
    "--rank",
    "-r",
    "ranks",
    multiple=True,
    type=click.IntRange(min=0),
    help="Only this worker's log, by its node rank; repeatable.",
)
@_cluster_options
def logs(
    job: str, follow: bool, ranks: tuple[int, ...], kubeconfig: str, context: str, namespace: str
) -> None:
    """Print the logs of JOB's workers in one stream, each line with its node's [rank].

    \b
    Examples:
      kubectl torchrun logs my-project-x7k2p --follow
      kubectl torchrun logs my-project-x7k2p --rank 0
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import commands

        return commands.logs(target, job, frozenset(ranks), terminal, follow_it=follow)

    _run(work, kubeconfig, context, namespace)


@cli.command()
@click.argument("job")
@_cluster_options
def why(job: str, kubeconfig: str, context: str, namespace: str) -> None:
    """Say why JOB waits or died: reason, earlier attempts, last lines of the first failed rank.

    \b
    Example:
      kubectl torchrun why my-project-x7k2p
    """

    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import life

        return life.why(target, job)

    _run(work, kubeconfig, context, namespace)


@cli.command()
@click.argument("job")
@_cluster_options
def suspend(job: str, kubeconfig: str, context: str, namespace: str) -> None:
    """Pause JOB: ranks get SIGTERM and a grace period, then all but the claims is freed.

    \b
    Example:
      kubectl torchrun suspend my-project-x7k2p
    """
    _pause(job, kubeconfig, context, namespace, paused=True)


@cli.command()
@click.argument("job")
@_cluster_options
def resume(job: str, kubeconfig: str, context: str, namespace: str) -> None:
    """Let JOB go on after a pause, as a new gang on the same workspace.

    \b
    Example:
      kubectl torchrun resume my-project-x7k2p
    """
    _pause(job, kubeconfig, context, namespace, paused=False)


def _pause(job: str, kubeconfig: str, context: str, namespace: str, *, paused: bool) -> None:
    def work(target: "Target", terminal: "Terminal") -> int:
        from kubectl_torchrun import life

        return life.suspend(target, job, terminal, paused=paused)

    _run(work, kubeconfig, context, namespace)


def _run(
    work: "Callable[[Target, Terminal], int]",
    kubeconfig: str,
    context: str,
    namespace: str,
    stopped: str = "",
) -> None:
    from kubectl_torchrun.errors import DETACHED, Problem
    from kubectl_torchrun.kubectl import Target
    from kubectl_torchrun.terminal import Terminal

    with Terminal() as terminal:
        try:
            code = work(Target(kubeconfig, context, namespace), terminal)
        except Problem as problem:
            terminal.at_rest()
            click.echo(f"error: {problem}", err=True)
            code = problem.exit_code
        except KeyboardInterrupt:
            terminal.interrupted()
            click.echo(f"Stopped{stopped}.", err=True)
            code = DETACHED
    sys.exit(code)


def main() -> None:
    """Entry point of kubectl-torchrun."""
    cli(prog_name="kubectl torchrun")


if __name__ == "__main__":
    main()
