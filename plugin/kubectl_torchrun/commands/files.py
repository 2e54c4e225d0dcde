"""`files`: what would be sent of a directory."""

import click

from kubectl_torchrun.cli.options import Command, run_command
from kubectl_torchrun.cli.request import directory_to_send
from kubectl_torchrun.terminal import Terminal


@click.command("files", cls=Command)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
def command(directory: str | None) -> None:
    """Print what would be sent of DIRECTORY (default: as submit): digest, bytes, mode and path.

    An empty directory has no digest and the mode `dir`. No cluster is asked.

    \b
    Examples:
      kubectl torchrun files
      kubectl torchrun files . | sort -k 2 -n | tail
    """

    def work(terminal: Terminal) -> int:
        from kubectl_torchrun import output
        from kubectl_torchrun.cluster.kubectl import ClusterNamespace
        from kubectl_torchrun.upload import pack, tree
        from kubectl_torchrun.upload.cache import UploadCache

        place = directory_to_send(directory, terminal)
        files = tree.scan(place)
        pack.check(files)
        workspace = UploadCache(ClusterNamespace("", ""), place).digest(files)
        output.put(workspace.manifest.text)
        return 0

    run_command(work)
