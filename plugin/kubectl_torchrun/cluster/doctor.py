"""The report of `doctor`: cluster problems and how to fix them."""

from collections.abc import Sequence

import anyio

from kubectl_torchrun import output
from kubectl_torchrun.cluster import checks, checks_controller
from kubectl_torchrun.cluster.checks import Finding
from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.cluster.kubectl import Target
from kubectl_torchrun.cluster.session import session
from kubectl_torchrun.errors import RUN_FAILED, SUCCEEDED
from kubectl_torchrun.terminal import Terminal
from kubectl_torchrun.text import escape, style
from torchrun_api.json import JsonObject, JsonValue

_COLOURS = {"ok": "green", "note": "blue", "warn": "yellow", "fail": "red"}
_LEVEL = "pod-security.kubernetes.io/enforce"

# Group, resource, subresource, verbs, purpose, and whether a run needs them.
_RIGHTS: tuple[tuple[str, str, str, tuple[str, ...], str, bool], ...] = (
    ("torchrun.ai", "torchrunjobs", "", ("create", "get", "list", "watch"), "submit", True),
    ("", "pods", "", ("list", "watch"), "follow a run", True),
    ("", "pods", "proxy", ("get", "update"), "upload", True),
    ("", "pods", "log", ("get",), "logs", True),
    ("torchrun.ai", "torchrunqueues", "", ("list",), "find the queue", False),
    ("torchrun.ai", "torchrunjobs", "", ("patch",), "suspend, resume, scale, sync", False),
    ("torchrun.ai", "torchrunjobs", "", ("delete",), "cancel", False),
    ("", "pods", "exec", ("create",), "exec, logs of earlier attempts", False),
    ("", "pods", "portforward", ("create",), "port-forward", False),
    ("", "pods", "", ("create", "delete"), "logs of ended jobs from their PVC", False),
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
    failed = sum(finding.verdict == "fail" for finding in findings)
    if failed:
        terminal.note(f"{failed} check{'s' * (failed != 1)} failed.")
        return RUN_FAILED
    terminal.note(f"Jobs can run in namespace {cluster.namespace}.")
    return SUCCEEDED


async def examine(api: Api) -> list[Finding]:
    """All findings, in the order of the report. Raises Unreachable; refusals are findings."""
    version = await api.read("/version")
    findings = [
        Finding(
            "ok", "cluster", f"Kubernetes {version.get('gitVersion')}, namespace {api.namespace}"
        )
    ]
    queue_findings, queues = await checks.queues(api)
    sections: list[list[Finding]] = [[], [], [], [], [], [], []]

    async def fill(at: int, section: "checks.Section") -> None:
        sections[at] = await section

    async with anyio.create_task_group() as tasks:
        for at, section in enumerate(
            (
                checks.kinds(api),
                checks_controller.controller(api),
                checks.storage(api),
                checks.gpus(api, queues),
                checks.schedulers(api, queues),
                permissions(api),
                security(api),
            )
        ):
            tasks.start_soon(fill, at, section)
    for part in (*sections[:2], queue_findings, *sections[2:]):
        findings += part
    return findings


async def permissions(api: Api) -> list[Finding]:
    """Permissions of the user, by SelfSubjectAccessReview."""
    missing: list[Finding] = []
    allowed = 0
    for group, resource, part, verbs, purpose, needed in _RIGHTS:
        name = f"{resource}/{part}" if part else resource
        for verb in verbs:
            review = await _check_permission(api, group, resource, part, verb)
            if review is None:
                text = "Cannot check permissions: the API server rejects access reviews"
                return [Finding("note", "permissions", text)]
            if review:
                allowed += 1
                continue
            fix = f"Ask an administrator for the role edit in namespace {api.namespace}"
            text = f"No permission to {verb} {name} (needed for: {purpose})"
            missing.append(Finding("fail" if needed else "warn", "permissions", text, fix))
    text = f"All {allowed} permissions that the commands need"
    return missing or [Finding("ok", "permissions", text)]


async def _check_permission(
    api: Api, group: str, resource: str, part: str, verb: str
) -> bool | None:
    attributes: JsonObject = {
        "namespace": api.namespace,
        "group": group,
        "resource": resource,
        "subresource": part,
        "verb": verb,
    }
    body: JsonObject = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await api.ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    except ApiError:
        return None
    status = answer.get("status")
    return isinstance(status, dict) and status.get("allowed") is True


async def security(api: Api) -> list[Finding]:
    """The Pod Security level that the namespace enforces."""
    try:
        namespace = await api.read(f"/api/v1/namespaces/{api.namespace}")
    except ApiError as error:
        if error.status == 404:
            fix = "Select another one with -n; see: kubectl get namespaces"
            text = f"Namespace {api.namespace} does not exist"
            return [Finding("fail", "security", text, fix)]
        return [checks.unreadable_finding("security", error)]
    metadata = namespace.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    level = labels.get(_LEVEL) if isinstance(labels, dict) else None
    if level == "restricted":
        text = "The namespace enforces Pod Security restricted: containers cannot run as root"
        fix = "Set podSecurity: restricted in its queues"
        return [Finding("note", "security", text, fix)]
    return [Finding("ok", "security", f"Pod Security level: {level or 'no label'}")]


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
