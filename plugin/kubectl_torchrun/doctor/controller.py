"""Versions, CRDs, the controller, and what the user may do."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.doctor.snapshot import (
    CONTROLLER_QUERY,
    ClusterSnapshot,
    Finding,
    Severity,
    field_at,
    items_at,
    name_of,
    text_at,
    unreadable_finding,
    words_at,
)
from kubectl_torchrun.output import duration
from kubectl_torchrun.version import version
from torchrun_api.json import JsonObject

OLDEST_MINOR = 33  # as kubeVersion of the chart

_INSTALL = "Ask an administrator to install it: kubectl apply -f manifests/crd, then the controller"
_COORDINATION = "/apis/coordination.k8s.io/v1"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_LEASE = "torchrun-controller"
_OWN = "metadata.namespace"  # the field of the pod
_LEASE_SECONDS = 60.0  # a leader renews every few seconds
_PORT = 8080
_FAILS, _NOTES = "[-] ", "[!] "  # of /readyz
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


def check_version(snapshot: ClusterSnapshot) -> list[Finding]:
    """The version of the API server, and whether the controller supports it."""
    version = text_at(snapshot.read("version"), "gitVersion")
    match = re.match(r"v1\.(\d+)", version)
    if match and int(match[1]) < OLDEST_MINOR:
        text = f"Kubernetes {version} is older than 1.{OLDEST_MINOR}, the oldest that is supported"
        return [Finding("warn", "cluster", text, "Upgrade the cluster")]
    text = f"Kubernetes {version}, namespace {snapshot.namespace}"
    return [Finding("ok", "cluster", text)]


def check_kinds(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether TorchrunJob and TorchrunQueue are served, and in which versions."""
    group = snapshot.find("torchrun")
    if group is None:
        return [Finding("fail", "kinds", "The TorchrunJob CRD is not installed", _INSTALL)]
    versions = [text_at(item, "version") for item in items_at(group, "versions")]
    if "v1alpha1" not in versions:
        text = f"The cluster serves {', '.join(versions)}; this plugin needs v1alpha1"
        return [Finding("fail", "kinds", text, "Install the plugin version of the controller")]
    served = {text_at(item, "name") for item in items_at(snapshot.read("kinds"), "resources")}
    missing = {"torchrunjobs", "torchrunqueues", "torchrunjobs/status"} - served
    if missing:
        text = f"The cluster does not serve {', '.join(sorted(missing))}"
        return [Finding("fail", "kinds", text, _INSTALL)]
    return [Finding("ok", "kinds", "TorchrunJob and TorchrunQueue, v1alpha1")]


async def check_controller(api: Api, snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether a controller watches the namespace, leads, and reports no problems.

    Raises ApiError and Unreachable.
    """
    try:
        deployments = snapshot.items("deployments")
    except RequestError:  # perhaps those of the user's namespace are readable
        deployments = await _controller_objects(api, "/apis/apps/v1", "deployments", api.namespace)
        if not deployments:
            raise
    if not deployments:
        return [Finding("fail", "controller", "The controller is not installed", _INSTALL)]
    mine = [each for each in deployments if _watched(each) in ("", api.namespace)]
    if not mine:
        listed = ", ".join(
            f"{text_at(item, 'metadata', 'namespace')}/{name_of(item)} watches {_watched(item)}"
            for item in deployments
        )
        text = f"No controller watches namespace {api.namespace}: {listed}"
        fix = "Select a namespace that is watched with -n, or install a controller in this one"
        return [Finding("fail", "controller", text, fix)]
    return [finding for each in mine for finding in await _check_deployment(api, each)]


def _watched(deployment: JsonObject) -> str:
    """The namespace that a controller watches; empty for all."""
    watched = setting(deployment, "namespace")
    return text_at(deployment, "metadata", "namespace") if watched == _OWN else watched


async def _check_deployment(api: Api, deployment: JsonObject) -> list[Finding]:
    name, where = name_of(deployment), text_at(deployment, "metadata", "namespace")
    ready = field_at(deployment, "status", "readyReplicas") or 0
    replicas = field_at(deployment, "spec", "replicas")
    containers = items_at(deployment, "spec", "template", "spec", "containers")
    images = ", ".join(text_at(container, "image") for container in containers)
    text = f"{where}/{name}: {ready} of {replicas} ready, image {images}"
    pods = await _controller_objects(api, "/api/v1", "pods", where)
    if ready:
        first = Finding("ok", "controller", text)
    else:
        fix = f"kubectl describe pods -n {where}; kubectl logs deploy/{name} -n {where}"
        first = Finding("fail", "controller", text + _waiting_reason(pods), fix)
    readiness = await _check_readiness(api, where, pods)
    leader = await _check_leader(api, deployment)
    return [first, *check_skew(deployment, version()), *readiness, leader]


def check_skew(deployment: JsonObject, plugin: str) -> list[Finding]:
    """Whether plugin and controller have the same minor version, by image tag or chart label."""
    ours, theirs = _minor(plugin), _minor(controller_version(deployment))
    if ours is None or theirs is None or ours == theirs:
        return []
    older = "plugin" if ours < theirs else "controller"
    text = (
        f"The plugin has version {plugin}, the controller {theirs[0]}.{theirs[1]}: sync pods can"
        " refuse uploads of another minor version"
    )
    return [Finding("warn", "controller", text, f"Upgrade the {older}")]


def controller_version(deployment: JsonObject) -> str:
    """The version of a controller by image tag or chart label, "" if neither has one."""
    containers = items_at(deployment, "spec", "template", "spec", "containers")
    tags = [
        text_at(container, "image").partition("@")[0].rpartition(":")[2] for container in containers
    ]
    label = text_at(deployment, "metadata", "labels", "app.kubernetes.io/version")
    return next((text for text in (*tags, label) if _minor(text)), "")


def _minor(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as v0.1.0; None for other texts."""
    match = re.match(r"v?(\d+)\.(\d+)\.\d+", text)
    return (int(match[1]), int(match[2])) if match else None


async def _controller_objects(api: Api, root: str, plural: str, where: str) -> list[JsonObject]:
    """The controller's objects of a namespace; none if they cannot be read."""
    try:
        listed = await api.read(f"{root}/namespaces/{where}/{plural}", CONTROLLER_QUERY)
    except RequestError:
        return []
    return items_at(listed, "items")


def _waiting_reason(pods: Sequence[JsonObject]) -> str:
    """Why a container of the controller does not run: its last message, else the kubelet's."""
    for pod in pods:
        for container in items_at(pod, "status", "containerStatuses"):
            for state in ("state", "lastState"):
                if message := field_at(container, state, "terminated", "message"):
                    return f"; {str(message).strip()}"
            if reason := field_at(container, "state", "waiting", "reason"):
                message = field_at(container, "state", "waiting", "message") or ""
                return f"; {reason}: {message}".rstrip(": ")
    return ""


async def _check_readiness(api: Api, where: str, pods: Sequence[JsonObject]) -> list[Finding]:
    """Problems that /readyz of running replicas reports: permissions, kinds, the lease."""
    problems: dict[str, Severity] = {}
    for pod in pods:
        if field_at(pod, "status", "phase") != "Running":
            continue
        try:
            _, body = await api.ask_pod(name_of(pod), "GET", "/readyz", namespace=where, port=_PORT)
        except RequestError as error:
            return [unreadable_finding("readiness", error)]
        for line in body.decode(errors="replace").splitlines():
            if line.startswith(_FAILS):
                problems[line.removeprefix(_FAILS)] = "fail"
            elif line.startswith(_NOTES):
                problems[line.removeprefix(_NOTES)] = "warn"
    return [Finding(severity, "readiness", text) for text, severity in problems.items()]


async def _check_leader(api: Api, deployment: JsonObject) -> Finding:
    name, where = name_of(deployment), text_at(deployment, "metadata", "namespace")
    lease_name = setting(deployment, "lease-name") or _LEASE
    namespace = setting(deployment, "lease-namespace") or where
    try:
        lease = await api.read(f"{_COORDINATION}/namespaces/{namespace}/leases/{lease_name}")
    except RequestError as error:
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


def setting(deployment: JsonObject, name: str) -> str:
    """A setting of the controller, by its flag or else its variable; empty if it has neither.

    A variable that refers to a field of the pod has that field's path.
    """
    flag, variable = f"--{name}", f"TORCHRUN_{name.upper().replace('-', '_')}"
    found = ""
    for container in items_at(deployment, "spec", "template", "spec", "containers"):
        for entry in items_at(container, "env"):
            if entry.get("name") == variable:
                found = text_at(entry, "value") or text_at(
                    entry, "valueFrom", "fieldRef", "fieldPath"
                )
        for argument, following in pairwise([*words_at(container, "args"), ""]):
            if argument == flag:
                found = following
            elif argument.startswith(f"{flag}="):
                found = argument.removeprefix(f"{flag}=")
    return found


def _lease_holder(lease: JsonObject) -> tuple[str, float]:
    """Holder and time of renewal as text, and seconds since; empty text if nobody holds it."""
    holder, renewed = (field_at(lease, "spec", key) for key in ("holderIdentity", "renewTime"))
    if not holder or not renewed:
        return "", 0.0
    age = (datetime.now(UTC) - datetime.fromisoformat(str(renewed))).total_seconds()
    return f"{holder}, renewed {duration(max(int(age), 0))} ago", age


async def check_permissions(api: Api) -> list[Finding]:
    """A finding for each permission that the user lacks. Raises ApiError and Unreachable."""
    allowed: dict[tuple[str, str, str, str], bool] = {}
    errors: list[RequestError | Unreachable] = []

    async def ask(group: str, resource: str, part: str, verb: str) -> None:
        attributes: JsonObject = {
            "namespace": api.namespace,
            "group": group,
            "resource": resource,
            "subresource": part,
            "verb": verb,
        }
        review: JsonObject = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        try:
            answer = await api.ask(_REVIEWS, review)
        except (RequestError, Unreachable) as error:
            errors.append(error)
        else:
            allowed[group, resource, part, verb] = field_at(answer, "status", "allowed") is True

    async with anyio.create_task_group() as tasks:
        for group, resource, part, verbs, _, _ in _RIGHTS:
            for verb in verbs:
                tasks.start_soon(ask, group, resource, part, verb)
    if errors:
        raise errors[0]
    missing: list[Finding] = []
    for group, resource, part, verbs, purpose, needed in _RIGHTS:
        name = f"{resource}/{part}" if part else resource
        fix = f"Ask an administrator for the role edit in namespace {api.namespace}"
        for verb in verbs:
            if not allowed[group, resource, part, verb]:
                text = f"No permission to {verb} {name} (needed for: {purpose})"
                missing.append(Finding("fail" if needed else "warn", "permissions", text, fix))
    text = f"All {len(allowed)} permissions that the commands need"
    return missing or [Finding("ok", "permissions", text)]
