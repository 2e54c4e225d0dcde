"""The declared exit codes are those of the programs, and the controller counts them as declared."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from torchrun_api import names
from torchrun_api.contract import exit_codes
from torchrun_api.contract.exit_codes import LAUNCHER, PLUGIN, SETUP, ExitStatus
from torchrun_api.kinds.core import ContainerState, ContainerStatus, Pod, PodStatus, StateTerminated
from torchrun_controller.reconcile.gang.failures import find_root_cause
from torchrun_controller.reconcile.gang.restarts import (
    Counts,
    FailureAction,
    evaluate_failure_policy,
)
from torchrun_controller.reconcile.spec.reliability import ResolvedReliability
from torchrun_sdk.spec import RAISED

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "runtime/torchrun_runtime/launch"
CALLS = {"LaunchError": (0, "exit_code"), "StopRequest": (1, ""), "Cause": (3, "")}


def raised() -> Iterator[tuple[str, int | None]]:
    """Each reason in the launcher's source with its exit code; None if it depends on a program."""
    for path in LAUNCH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            place, keyword = CALLS.get(node.func.id, (-1, ""))
            if not 0 <= place < len(node.args):
                continue
            reason = node.args[place]
            code: ast.expr = ast.Name("LAUNCH_FAILED")
            if not keyword:
                code = node.args[0]
            code = next((word.value for word in node.keywords if word.arg == keyword), code)
            if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
                constant = code.id if isinstance(code, ast.Name) else ""
                yield reason.value, getattr(exit_codes, constant, None)


def test_every_reason_of_the_launcher_is_declared_with_its_code() -> None:
    raised_codes = set(raised())
    assert len(raised_codes) > 15
    for reason, code in raised_codes:
        declared = [status for status in (*LAUNCHER, *SETUP) if reason in status.reasons]
        assert declared, reason
        assert code is None or any(code in status.codes for status in declared), (reason, code)


def test_every_declared_reason_is_one_of_the_launcher() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in LAUNCH.rglob("*.py"))
    declared = {reason for status in (*LAUNCHER, *SETUP) for reason in status.reasons}
    assert {reason for reason in declared if f'"{reason}"' not in source} == set()


def test_programs_that_cannot_import_the_codes_have_the_same() -> None:
    main = (LAUNCH / "__main__.py").read_text(encoding="utf-8")
    assert re.findall(r"_EXIT_CODE = (\d+)", main) == [str(exit_codes.PYTHON_TOO_OLD)]
    assert RAISED == exit_codes.SDK_RAISED


def test_the_help_of_the_plugin_lists_its_codes() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).stdout.partition("\nExit codes:\n")[2]
    listed = [int(code) for code in re.findall(r"(?m)^  (\d+) ", shown)]
    assert listed == [status.codes[0] for status in PLUGIN]


def failed_worker(status: ExitStatus, reason: str) -> Pod:
    code = status.codes[0]
    signal = code - 128 if status.codes[0] > 128 else None
    message = json.dumps({"exitCode": code, "reason": reason, "signal": signal, "message": "m"})
    ended = StateTerminated(exit_code=code, message=message)
    trainer = ContainerStatus(name=names.TRAINER_CONTAINER, state=ContainerState(terminated=ended))
    return Pod(status=PodStatus(phase="Failed", container_statuses=(trainer,)))


@pytest.mark.parametrize(
    ("status", "reason"),
    [(status, reason) for status in LAUNCHER for reason in status.reasons],
    ids=lambda value: value if isinstance(value, str) else str(value.codes[0]),
)
def test_the_controller_reads_and_counts_it_as_declared(status: ExitStatus, reason: str) -> None:
    failure = find_root_cause((failed_worker(status, reason),))
    assert failure is not None
    assert (failure.details.reason, failure.details.exit_code) == (reason, status.codes[0])
    policy = ResolvedReliability(max_restarts=1)
    counted = FailureAction.RESTART if status.counted else FailureAction.IGNORE
    if status.permanent:
        counted = FailureAction.FAIL
    assert evaluate_failure_policy(failure, policy, Counts()) is counted
