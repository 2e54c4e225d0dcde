"""The permissions of the user, by SelfSubjectAccessReview."""

import anyio

from kubectl_torchrun.cluster.client import Api, ApiError, Unreachable
from kubectl_torchrun.doctor.findings import Finding, field_at
from torchrun_api.json import JsonObject

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


async def check_permissions(api: Api) -> list[Finding]:
    """A finding for each permission that the user lacks. Raises ApiError and Unreachable."""
    allowed: dict[tuple[str, str, str, str], bool] = {}
    errors: list[ApiError | Unreachable] = []

    async def ask(group: str, resource: str, part: str, verb: str) -> None:
        try:
            answer = await _is_allowed(api, group, resource, part, verb)
        except (ApiError, Unreachable) as error:
            errors.append(error)
        else:
            allowed[group, resource, part, verb] = answer

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


async def _is_allowed(api: Api, group: str, resource: str, part: str, verb: str) -> bool:
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
    answer = await api.ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return field_at(answer, "status", "allowed") is True
