"""The report of `doctor`: cluster problems and how to fix them."""

from collections.abc import Awaitable, Callable, Iterator, Sequence

from kubectl_torchrun import output
from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.doctor.controller import (
    check_controller,
    check_kinds,
    check_permissions,
    check_version,
)
from kubectl_torchrun.doctor.queues import (
    check_autoscaler,
    check_claims,
    check_machines,
    check_queues,
    check_schedulers,
    check_storage,
)
from kubectl_torchrun.doctor.snapshot import (
    ClusterSnapshot,
    Finding,
    read_snapshot,
    unreadable_finding,
)
from kubectl_torchrun.errors import RUN_FAILED, SUCCEEDED
from kubectl_torchrun.terminal import Display
from kubectl_torchrun.text import escape, style
from torchrun_api.json import JsonValue

_COLOURS = {"ok": "green", "note": "blue", "skip": "cyan", "warn": "yellow", "fail": "red"}

_Check = Callable[[ClusterSnapshot], list[Finding]]
# Checks in the order of the report, by the subject that a check without its data reports. The
# controller and the permissions need further requests.
_BEFORE: tuple[tuple[str, _Check], ...] = (("cluster", check_version), ("kinds", check_kinds))
_AFTER: tuple[tuple[str, _Check], ...] = (
    ("queues", check_queues),
    ("storage", check_storage),
    ("claims", check_claims),
    ("machines", check_machines),
    ("autoscaler", check_autoscaler),
    ("schedulers", check_schedulers),
)


def print_findings(target: Target, form: str, terminal: Display) -> int:
    """Print the findings; the exit code is RUN_FAILED if a check failed."""
    with session(target) as cluster:
        findings = cluster.run(examine)
        if form:
            listed: list[JsonValue] = [
                {key: value for key, value in finding._asdict().items() if value}
                for finding in findings
            ]
            output.write({"namespace": cluster.namespace, "findings": listed}, form)
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
    return [
        *_run(snapshot, _BEFORE),
        *await _ask("controller", check_controller(api, snapshot)),
        *_run(snapshot, _AFTER),
        *await _ask("permissions", check_permissions(api)),
    ]


def _run(snapshot: ClusterSnapshot, checks: Sequence[tuple[str, _Check]]) -> Iterator[Finding]:
    for subject, check in checks:
        try:
            yield from check(snapshot)
        except (RequestError, Unreachable) as error:
            yield unreadable_finding(subject, error)


async def _ask(subject: str, findings: Awaitable[list[Finding]]) -> list[Finding]:
    try:
        return await findings
    except (RequestError, Unreachable) as error:
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
