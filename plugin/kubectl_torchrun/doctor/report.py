"""The report of `doctor`: cluster problems and how to fix them."""

from collections.abc import Awaitable, Callable, Sequence

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.doctor.admission import check_policies, check_security
from kubectl_torchrun.doctor.constraints import check_constraints
from kubectl_torchrun.doctor.controller import check_controller
from kubectl_torchrun.doctor.environment import check_environment
from kubectl_torchrun.doctor.findings import Finding, unreadable_finding
from kubectl_torchrun.doctor.installation import (
    check_kinds,
    check_queues,
    check_schedulers,
    check_version,
)
from kubectl_torchrun.doctor.network import check_network
from kubectl_torchrun.doctor.nodes import check_autoscaler, check_nodes
from kubectl_torchrun.doctor.permissions import check_permissions
from kubectl_torchrun.doctor.quota import check_limits, check_quota
from kubectl_torchrun.doctor.reading import read_snapshot
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from kubectl_torchrun.doctor.storage import check_storage
from kubectl_torchrun.doctor.webhooks import check_webhooks
from kubectl_torchrun.errors import RUN_FAILED, SUCCEEDED
from kubectl_torchrun.terminal import Terminal
from kubectl_torchrun.text import escape, style
from torchrun_api.json import JsonObject, JsonValue

_COLOURS = {"ok": "green", "note": "blue", "skip": "cyan", "warn": "yellow", "fail": "red"}

# Checks in the order of the report, by the subject that a check without its data reports. The
# controller and the permissions need requests of their own.
_BEFORE: tuple[tuple[str, Callable[[ClusterSnapshot], list[Finding]]], ...] = (
    ("cluster", check_version),
    ("environment", check_environment),
    ("kinds", check_kinds),
)
_AFTER: tuple[tuple[str, Callable[[ClusterSnapshot], list[Finding]]], ...] = (
    ("queues", check_queues),
    ("storage", check_storage),
    ("nodes", check_nodes),
    ("autoscaler", check_autoscaler),
    ("schedulers", check_schedulers),
    ("network", check_network),
    ("quota", check_quota),
    ("limits", check_limits),
    ("security", check_security),
    ("admission", check_constraints),
    ("webhooks", check_webhooks),
    ("policies", check_policies),
)


def print_findings(target: Target, form: str, terminal: Terminal) -> int:
    """Print the findings; the exit code is RUN_FAILED if a check failed."""
    with session(target) as cluster:
        findings = cluster.run(examine)
        if form:
            body: JsonObject = {"namespace": cluster.namespace, "findings": _json(findings)}
            output.write(body, form)
        else:
            output.print_lines(report(findings, output.screen_width()))
    terminal.note(summary(findings, cluster.namespace))
    return RUN_FAILED if any(finding.verdict == "fail" for finding in findings) else SUCCEEDED


def summary(findings: Sequence[Finding], namespace: str) -> str:
    """The last line: whether jobs can run, as far as it was checked."""
    failed, skipped = (
        sum(finding.verdict == verdict for finding in findings) for verdict in ("fail", "skip")
    )
    unchecked = f" {skipped} check{'s' * (skipped != 1)} could not be made." if skipped else ""
    if failed:
        return f"{failed} check{'s' * (failed != 1)} failed.{unchecked}"
    if skipped:
        return f"No check failed in namespace {namespace}.{unchecked}"
    return f"Jobs can run in namespace {namespace}."


async def examine(api: Api) -> list[Finding]:
    """All findings, in the order of the report. Raises Unreachable if there is no API server.

    Everything else that cannot be read is a finding of its own check.
    """
    snapshot = await read_snapshot(api)
    asked: dict[str, list[Finding]] = {}

    async def ask(subject: str, findings: Awaitable[list[Finding]]) -> None:
        try:
            asked[subject] = await findings
        except (ApiError, Unreachable) as error:
            asked[subject] = [unreadable_finding(subject, error)]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "controller", check_controller(api, snapshot))
        tasks.start_soon(ask, "permissions", check_permissions(api))
    findings = [f for subject, check in _BEFORE for f in run_check(subject, check, snapshot)]
    findings += asked["controller"]
    findings += [f for subject, check in _AFTER for f in run_check(subject, check, snapshot)]
    return findings + asked["permissions"]


def run_check(
    subject: str, check: Callable[[ClusterSnapshot], list[Finding]], snapshot: ClusterSnapshot
) -> list[Finding]:
    """The findings of a check; one that says why if its data cannot be read."""
    try:
        return check(snapshot)
    except (ApiError, Unreachable) as error:
        return [unreadable_finding(subject, error)]


def report(findings: Sequence[Finding], width: int | None) -> list[str]:
    """Lines for each finding and its fix, within the width."""
    import textwrap

    size = max((len(finding.subject) for finding in findings), default=0)
    indent = " " * (6 + size + 2)
    lines: list[str] = []
    for finding in findings:
        mark = style(f"{finding.verdict:<4}", fg=_COLOURS[finding.verdict])
        texts = [finding.text, *([f"→ {finding.fix}"] if finding.fix else [])]
        room = max((width or 10_000) - len(indent), 24)
        parts = [part for text in texts for part in textwrap.wrap(escape(text), room)] or [""]
        lines.append(mark + f"  {finding.subject:<{size}}  {parts[0]}")
        lines += [f"{indent}{part}" for part in parts[1:]]
    return lines


def _json(findings: Sequence[Finding]) -> list[JsonValue]:
    return [
        {key: value for key, value in finding._asdict().items() if value} for finding in findings
    ]
