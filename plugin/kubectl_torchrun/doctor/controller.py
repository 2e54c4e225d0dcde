"""Checks of doctor for the controller: its Deployment, leader and readiness."""

import re
from datetime import UTC, datetime
from itertools import pairwise

from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.doctor.findings import (
    CONTROLLER_QUERY,
    INSTALL,
    Finding,
    Severity,
    field_at,
    items_at,
    text_at,
    unreadable_finding,
    words_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from kubectl_torchrun.output import duration
from kubectl_torchrun.version import version
from torchrun_api.json import JsonObject

_COORDINATION = "/apis/coordination.k8s.io/v1"
_LEASE = "torchrun-controller"
_LEASE_SECONDS = 60.0  # a leader renews every few seconds
_PORT = 8080
_FAILS, _NOTES = "[-] ", "[!] "  # of /readyz


async def check_controller(api: Api, snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether the controller runs, one of its replicas leads, and it reports no problems.

    Raises ApiError and Unreachable.
    """
    refused = None
    try:
        deployments = items_at(snapshot.read("deployments"), "items")
    except ApiError as error:
        if error.status != 403:
            raise
        refused = error
        deployments = await _list_own(api, "/apis/apps/v1", "deployments", CONTROLLER_QUERY)
    findings = []
    for item in deployments:
        name, where = (str(field_at(item, "metadata", key)) for key in ("name", "namespace"))
        ready = field_at(item, "status", "readyReplicas") or 0
        replicas = field_at(item, "spec", "replicas")
        containers = items_at(item, "spec", "template", "spec", "containers")
        images = ", ".join(str(field_at(container, "image")) for container in containers)
        text = f"{where}/{name}: {ready} of {replicas} ready, image {images}"
        if ready:
            findings.append(Finding("ok", "controller", text))
        else:
            fix = f"kubectl describe pods -n {where}; kubectl logs deploy/{name} -n {where}"
            reason = await _waiting_reason(api, where)
            findings.append(Finding("fail", "controller", text + reason, fix))
        findings += check_skew(item, version())
        findings += await _check_readiness(api, where)
        findings.append(await _check_leader(api, item))
    return findings or [await _check_lease(api, refused)]


def check_skew(deployment: JsonObject, plugin: str) -> list[Finding]:
    """Whether plugin and controller have the same minor version, by image tag or chart label."""
    containers = items_at(deployment, "spec", "template", "spec", "containers")
    tags = [
        text_at(container, "image").partition("@")[0].rpartition(":")[2] for container in containers
    ]
    label = text_at(deployment, "metadata", "labels", "app.kubernetes.io/version")
    ours = _minor(plugin)
    theirs = next((found for text in (*tags, label) if (found := _minor(text))), None)
    if ours is None or theirs is None or ours == theirs:
        return []
    older = "plugin" if ours < theirs else "controller"
    text = (
        f"The plugin has version {plugin}, the controller {theirs[0]}.{theirs[1]}: sync pods can"
        " refuse uploads of another minor version"
    )
    return [Finding("warn", "controller", text, f"Upgrade the {older}")]


def _minor(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as v0.1.0; None for other texts."""
    match = re.match(r"v?(\d+)\.(\d+)\.\d+", text)
    return (int(match[1]), int(match[2])) if match else None


async def _list_own(api: Api, root: str, plural: str, query: dict[str, str]) -> list[JsonObject]:
    """Objects of the user's namespace; none if they cannot be read either."""
    try:
        path = f"{root}/namespaces/{api.namespace}/{plural}"
        return items_at(await api.read(path, query), "items")
    except ApiError:
        return []


async def _pods(api: Api, where: str) -> list[JsonObject]:
    try:
        pods = await api.read(f"/api/v1/namespaces/{where}/pods", CONTROLLER_QUERY)
    except ApiError:
        return []
    return items_at(pods, "items")


async def _waiting_reason(api: Api, where: str) -> str:
    """Why a container of the controller does not run: its last message, else the kubelet's."""
    for pod in await _pods(api, where):
        for container in items_at(pod, "status", "containerStatuses"):
            for state in ("state", "lastState"):
                if message := field_at(container, state, "terminated", "message"):
                    return f"; {str(message).strip()}"
            if reason := field_at(container, "state", "waiting", "reason"):
                message = field_at(container, "state", "waiting", "message") or ""
                return f"; {reason}: {message}".rstrip(": ")
    return ""


async def _check_readiness(api: Api, where: str) -> list[Finding]:
    """Problems that /readyz of running replicas reports: permissions, kinds, the lease."""
    problems: dict[str, Severity] = {}
    for pod in await _pods(api, where):
        if field_at(pod, "status", "phase") != "Running":
            continue
        name = str(field_at(pod, "metadata", "name"))
        try:
            _, body = await api.ask_pod(name, "GET", "/readyz", namespace=where, port=_PORT)
        except ApiError as error:
            return [unreadable_finding("readiness", error)]
        for line in body.decode(errors="replace").splitlines():
            if line.startswith(_FAILS):
                problems[line.removeprefix(_FAILS)] = "fail"
            elif line.startswith(_NOTES):
                problems[line.removeprefix(_NOTES)] = "warn"
    return [Finding(severity, "readiness", text) for text, severity in problems.items()]


async def _check_leader(api: Api, deployment: JsonObject) -> Finding:
    name, where = (str(field_at(deployment, "metadata", key)) for key in ("name", "namespace"))
    lease_name = _setting(deployment, "lease-name") or _LEASE
    namespace = _setting(deployment, "lease-namespace") or where
    try:
        lease = await api.read(f"{_COORDINATION}/namespaces/{namespace}/leases/{lease_name}")
    except ApiError as error:
        if error.status == 404:
            text = (
                f"No lease {lease_name} in namespace {namespace}: leader election is off, or no"
                " replica has led"
            )
            return Finding("note", "leader", text)
        return unreadable_finding("leader", error)
    text, age = _lease_holder(lease)
    fix = f"See the log: kubectl logs -n {where} deploy/{name}"
    if not text:
        return Finding("warn", "leader", "No replica holds the lease", fix)
    if age > _LEASE_SECONDS:
        return Finding("fail", "leader", text, fix)
    return Finding("ok", "leader", text)


def _setting(deployment: JsonObject, name: str) -> str:
    """A setting of the controller, by its flag or else its variable; empty if it has neither."""
    flag, variable = f"--{name}", f"TORCHRUN_{name.upper().replace('-', '_')}"
    found = ""
    for container in items_at(deployment, "spec", "template", "spec", "containers"):
        for entry in items_at(container, "env"):
            if entry.get("name") == variable:
                found = text_at(entry, "value")
        for argument, following in pairwise([*words_at(container, "args"), ""]):
            if argument == flag:
                found = following
            elif argument.startswith(f"{flag}="):
                found = argument.removeprefix(f"{flag}=")
    return found


async def _check_lease(api: Api, refused: ApiError | None) -> Finding:
    """Find a controller without a Deployment, for example of `make run`, by its lease.

    Raises the refusal if other namespaces, which may have the controller, cannot be read.
    """
    selector = {"fieldSelector": f"metadata.name={_LEASE}"}
    try:
        leases = items_at(await api.read(f"{_COORDINATION}/leases", selector), "items")
    except ApiError as error:
        refused = refused or (error if error.status == 403 else None)
        leases = await _list_own(api, _COORDINATION, "leases", selector)
    for lease in leases:
        text, age = _lease_holder(lease)
        if text and age <= _LEASE_SECONDS:
            where = field_at(lease, "metadata", "namespace")
            return Finding("ok", "controller", f"No Deployment; lease in namespace {where}: {text}")
    if refused is not None:
        raise refused
    return Finding("fail", "controller", "The controller is not installed", INSTALL)


def _lease_holder(lease: JsonObject) -> tuple[str, float]:
    """Holder and time of renewal as text, and seconds since; empty text if nobody holds it."""
    holder, renewed = (field_at(lease, "spec", key) for key in ("holderIdentity", "renewTime"))
    if not holder or not renewed:
        return "", 0.0
    age = (datetime.now(UTC) - datetime.fromisoformat(str(renewed))).total_seconds()
    return f"{holder}, renewed {duration(max(int(age), 0))} ago", age
