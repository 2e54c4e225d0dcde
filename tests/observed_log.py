"""The Plan of a log line of the controller: `cd tests && python -m observed_log < LINE`.

The controller logs such lines at level debug, in JSON: see operations.md.
"""

import sys
from typing import Any

import msgspec

from torchrun_api.kinds.core import SchedulingGroup
from torchrun_controller.controllers.decision_log import Input
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.model.plan import Plan


class Line(msgspec.Struct):
    """The part of a log line that is read."""

    input: Input


def plan_of(line: str) -> Plan:
    """Return the Plan that reconcile decides from a log line. Raises msgspec.DecodeError."""
    # The type of a Kind is only there for groups.
    read = msgspec.json.decode(line, type=Line, dec_hook=lambda kind, name: SchedulingGroup).input
    return reconcile(read.observed, read.now, read.defaults)


def main() -> None:
    """Print the Plan of each line of standard input that has one."""
    for line in sys.stdin:
        if '"message":"observed"' in line:
            plan: Any = msgspec.to_builtins(plan_of(line), enc_hook=lambda kind: kind.__name__)
            print(msgspec.json.format(msgspec.json.encode(plan)).decode())


if __name__ == "__main__":
    main()
