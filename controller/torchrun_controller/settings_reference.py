"""Write the reference of settings: python -m torchrun_controller.settings_reference FILE."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from torchrun_controller.settings import OPTIONS, Option

_PAGE = """# Settings of the controller

Configure the controller by flags, by environment variables, or by the chart. `make generate`
writes this page from `controller/torchrun_controller/settings.py`; `torchrun-controller --help`
prints the same.

| where | how |
|---|---|
| flag | `--log-level=debug`, in `args` of the container |
| environment variable | `TORCHRUN_LOG_LEVEL=debug`. A flag takes precedence. Empty: not set |
| chart | `--set settings.logLevel=debug`. The chart sets those that depend on its objects |

In the chart, `settings` has no keys for the runtime image, the namespace, kubeconfig, context, the
namespace of the Lease, addresses, ports and progress. Set `TORCHRUN_NAMESPACE`,
`TORCHRUN_LEASE_NAMESPACE` or `TORCHRUN_LISTEN_ADDRESS` in `extraEnv`, and progress by the value
`progress`. Keep the ports: the Service and the probes of the chart use them. For a Lease in another
namespace than that of the release, create a Role there with get, watch, create and patch on leases,
and bind it to the service account of the controller.

The controller reads the settings once, at its start. It exits with [code
2](exit-codes.md#the-controller) and one line if a setting is invalid. `--version` prints the
version. [Operations](operations.md) describes leader election and logs.
"""


def page() -> str:
    """Return the page as Markdown."""
    return _PAGE + "".join(_sections())


def _sections() -> Iterator[str]:
    for group in dict.fromkeys(option.group for option in OPTIONS):
        yield f"\n## {group.capitalize()}\n\n| flag, variable | default | accepted | meaning |\n"
        yield "|---|---|---|---|\n"
        yield from (_row(option) for option in OPTIONS if option.group == group)


def _row(option: Option) -> str:
    default = "required" if option.default is None else f"`{option.default}`"
    cells = (
        f"`{option.flag}`, `{option.variable}`",
        "empty" if option.default == "" else default,
        re.sub(r"(https?://\S+)", r"`\1`", option.accepted),
        option.help,
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
