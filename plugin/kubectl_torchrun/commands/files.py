"""`files`: the files of a directory that would be uploaded."""

from typing import TYPE_CHECKING

import click

from kubectl_torchrun.cli.options import Command, output_option, run_command
from kubectl_torchrun.cli.request import directory_to_send
from kubectl_torchrun.terminal import Display

if TYPE_CHECKING:
    from torchrun_api.contract.contents import Entry
    from torchrun_api.json import JsonObject


@click.command("files", cls=Command)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@output_option("name", "yaml", "json")
def command(directory: str | None, output: str) -> None:
    """List the files of DIRECTORY that would be uploaded: digest, size in bytes, mode and path.

    DIRECTORY defaults to that of submit. An empty directory has no digest and the mode `dir`.
    Does not connect to a cluster. -o name prints only the paths. Skipped files that match no
    ignore file go to stderr, with the reason.

    \b
    Examples:
      kubectl torchrun files
      kubectl torchrun files . | sort -k 2 -n | tail
      kubectl torchrun files -o json
    """

    def work(terminal: Display) -> int:
        from kubectl_torchrun.cluster.kubectl import ClusterNamespace
        from kubectl_torchrun.output import put, write
        from kubectl_torchrun.upload import consent, pack, tree
        from kubectl_torchrun.upload.cache import UploadCache

        place = directory_to_send(directory, terminal)
        files = consent.scan(place)
        pack.check(files)
        tree.note_skipped(files, terminal)
        workspace = UploadCache(ClusterNamespace("", ""), place).digest(files)
        entries = workspace.manifest.entries
        if output == "name":
            put("".join(f"{entry.path}\n" for entry in entries))
        elif output:
            write({"files": [_file(entry) for entry in entries]}, output)
        else:
            put(workspace.manifest.text)
        return 0

    run_command(work)


def _file(entry: "Entry") -> "JsonObject":
    return {"path": entry.path, "sha256": entry.sha256, "size": entry.size, "mode": entry.mode}
