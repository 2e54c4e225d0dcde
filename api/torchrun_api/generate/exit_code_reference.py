"""Write the reference of exit codes: python -m torchrun_api.generate.exit_code_reference FILE."""

import sys
from collections.abc import Iterator
from pathlib import Path

from torchrun_api.contract import exit_codes
from torchrun_api.contract.exit_codes import ExitStatus

_OPENING = """# Exit codes

Find out what an exit code means, in a script or in `kubectl describe pod`. `make generate` writes
this page from `api/torchrun_api/contract/exit_codes.py`.

"""
_WORKERS = """The container `trainer` of a worker runs the launcher, which runs the command.
The launcher writes reason, rank and exit code to the termination message, and the controller copies
them to `status.lastFailure`. [Troubleshooting](troubleshooting.md#failed-and-restarted) explains
the reasons.

"""
_RULES = """
The controller interprets the end of workers as follows:

- **Success:** a gang succeeds when all its workers exit with 0, or its
  [head](jobs.md#a-head-and-its-workers) does.
- **First failure:** if several workers failed, [one of them](failures.md#the-first-failure)
  decides.
- **Counted:** whether `maxRestarts` counts the failure. "The job fails" means that no restart can
  correct it, so none is tried, whatever the rules. A preempted or drained pod, a pod that was
  evicted because its machine was low on memory or disk, a deleted pod that ended by SIGTERM, and
  a lost machine are disruptions and are not counted, whatever the exit code.
- **Rules:** `exitCodes` of [`reliability.rules`](failures.md#rules) match the exit code of the
  first failure, and `signals` its signal. The first rule that matches replaces the column
  "counted".
- **No message:** if the container has no termination message of the launcher, the exit code of
  the container counts, and 129 to 191 mean signals 1 to 63.
"""
_SETUP = """The setup pod runs the launcher too. Failures before pip starts have the launcher's
codes for PythonTooOld (78) and for its failures (125). The controller reads the reason
from the termination message; see [packages](workspace.md#packages) for retries.

"""
_SYNC = """The controller reads the termination message, not the code: it retries with a back-off,
unless the message says that the failure is permanent.

"""


def page() -> str:
    """Return the page as Markdown."""
    return _OPENING + "\n".join(
        [
            "## kubectl torchrun\n\n" + _table(exit_codes.PLUGIN),
            "`exec` and `port-forward` replace themselves with kubectl and return its exit code.\n"
            "`port-forward --tensorboard` returns 0 after Ctrl-C. `kt` of the\n"
            "[SDK](../sdk/README.md) uses 0, 1, 2, 4 and 130 with the same meaning; `kt run`\n"
            "returns the exit code of its command.\n",
            "## Workers\n\n" + _WORKERS + _table(exit_codes.LAUNCHER) + _RULES,
            "## Setup pods\n\n" + _SETUP + _table(exit_codes.SETUP),
            "## Sync pods\n\n" + _SYNC + _table(exit_codes.SYNC),
            "## Serve pods\n\n" + _table(exit_codes.SERVE),
            "## The controller\n\n" + _table(exit_codes.CONTROLLER),
        ]
    )


def _table(statuses: tuple[ExitStatus, ...]) -> str:
    head = ["code", "meaning"]
    if any(status.reasons for status in statuses):
        head.insert(1, "reason")
    if any(status.counted is not None for status in statuses):
        head.append("counted")
    rows = [head, ["---"] * len(head), *([*_cells(status, head)] for status in statuses)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(status: ExitStatus, head: list[str]) -> Iterator[str]:
    first, last = status.codes[0], status.codes[-1]
    yield str(first) if first == last else f"{first} to {last}"
    if "reason" in head:
        yield ", ".join(status.reasons) or "-"
    yield status.meaning
    if "counted" in head:
        counted = {None: "-", True: "yes", False: "no"}[status.counted]
        yield "the job fails" if status.permanent else counted


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
