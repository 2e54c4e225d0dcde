"""Flags of the commands that change jobs: --wait, --timeout, --dry-run, -o and the cluster's."""

import functools
from collections.abc import Callable

from kubectl_torchrun.cli.options import (
    Function,
    cluster_options,
    dry_run_option,
    output_option,
    wait_options,
)

INTERRUPTED = "; the controller still makes the requested change"


def change_options(bare: str, *formats: str) -> Callable[[Function], Function]:
    """The flags, passed to the command as `options: ChangeOptions` and `target: Target`.

    bare: the condition of --wait without a value; formats: of -o.
    """

    def add(command: Function) -> Function:
        @functools.wraps(command)
        def wrapped(
            *, wait: str, timeout: float | None, dry_run: str, output: str, **rest: object
        ) -> None:
            from kubectl_torchrun.cluster.lifecycle import ChangeOptions

            command(options=ChangeOptions(wait, timeout, dry_run, output), **rest)

        result = output_option(*formats)(cluster_options(wrapped))
        return wait_options(bare)(dry_run_option(result))

    return add
