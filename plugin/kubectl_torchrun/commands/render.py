"""`render`: the objects that the controller would create for a job."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.options import Command, cluster_options, run_command
from kubectl_torchrun.cli.types import OneOf
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from torchrun_api.kinds.queue import TorchrunQueue


@click.command("render", cls=Command)
@click.option(
    "--filename",
    "-f",
    multiple=True,
    required=True,
    metavar="FILE",
    help="File with the TorchrunJob, its TorchrunQueue, or both; - reads stdin. Repeatable.",
)
@click.option(
    "--runtime-image",
    default="torchrun-controller",
    show_default=True,
    metavar="IMAGE",
    help="Image of the controller, which helper pods run.",
)
@click.option(
    "--output",
    "-o",
    default="yaml",
    type=OneOf(["yaml", "json"]),
    metavar="yaml|json",
    help="Output format.",
)
@cluster_options
def command(filename: tuple[str, ...], runtime_image: str, output: str, target: Target) -> None:
    """Print the objects that the controller would create for the TorchrunJob in FILE: PVCs, sync
    pod, Job and Service, in this order. Nothing is created.

    The queue comes from the files, else from the cluster. UIDs, the digest of the upload and
    addresses of pods are placeholders.

    \b
    Examples:
      kubectl torchrun render -f queue.yaml -f job.yaml
      kubectl torchrun render -f job.yaml > review.yaml
    """

    def work(_: Display) -> int:
        from kubectl_torchrun.local.render import print_objects, read_documents, render

        job, queue = read_documents(filename)
        if queue is None:
            queue = _read_queue(target, job.spec.job_queue)
        print_objects(render(job, queue, runtime_image), output)
        return 0

    run_command(work)


def _read_queue(target: Target, name: str) -> "TorchrunQueue":
    """The queue in the cluster. Raises Problem."""
    import msgspec

    from kubectl_torchrun.cluster.session import session
    from kubectl_torchrun.cluster.slices import QUEUES
    from torchrun_api.kinds.queue import TorchrunQueue

    with session(target) as cluster:
        path = QUEUES.path(cluster.namespace, name)
        return msgspec.convert(cluster.run(lambda api: api.read(path)), TorchrunQueue)
