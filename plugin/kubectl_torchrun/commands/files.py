"""`files`: the files of a directory that would be uploaded."""

import click

from kubectl_torchrun.cli.options import Command, run_command
from kubectl_torchrun.cli.request import directory_to_send
from kubectl_torchrun.terminal import Terminal


@click.command("files", cls=Command)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
def command(directory: str | None) -> None:
    """List the files of DIRECTORY that would be uploaded: digest, size in bytes, mode and path.

    DIRECTORY defaults to that of submit. An empty directory has no digest and the mode `dir`.
    Does not connect to a cluster.

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
