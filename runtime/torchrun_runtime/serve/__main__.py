"""torchrun-serve: give a job's workers the workspace over HTTP, where they share no storage."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from torchrun_api.contract.exit_codes import SERVE_FAILED
from torchrun_api.contract.variable import SERVE
from torchrun_api.generate.contract_reference import usage
from torchrun_runtime.serve.app import serving
from torchrun_runtime.serve.settings import ServeSettings, from_environment
from torchrun_runtime.serve.tokens import ApiServer, Keys, Verifier
from torchrun_runtime.serve.tree import ServedTree
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.report import log

_USAGE = f"""usage: torchrun-serve

Runs in the serve pod of a job next to torchrun-sync. Sends the files of the workspace to the
workers of its job: GET /v1/manifest, POST /v1/files. GET /readyz returns 200 when the workspace is
complete.

Environment (default):
{usage(SERVE)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of torchrun-serve; returns the exit status."""
    if sys.argv[1:] if arguments is None else arguments:
        print(_USAGE, end="")
        return 0
    try:
        settings = from_environment(os.environ)
    except SyncError as error:
        log("failed", "error", reason=error.reason, message=error.message)
        return SERVE_FAILED
    asyncio.run(serve(settings))
    return 0


async def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ApiServer(settings.api_server, settings.api_dir) as api:
        verifier = Verifier(settings.namespace, settings.job, Keys(api.signing_keys))
        tree = ServedTree(settings.directory)
        async with serving(tree, verifier, settings.host or None, settings.port) as port:
            log("listening", port=port, job=f"{settings.namespace}/{settings.job}")
            await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
