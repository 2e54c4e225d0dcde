"""Admission webhooks that see the pods or Jobs of the namespace, and their services."""

from collections.abc import Mapping
from typing import NamedTuple

from kubectl_torchrun.cluster.client import ApiError, Unreachable
from kubectl_torchrun.doctor.findings import (
    Finding,
    field_at,
    items_at,
    name_of,
    object_of,
    text_at,
    unreadable_finding,
    words_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api import names
from torchrun_api.json import JsonObject

_LISTS = ("validatingwebhooks", "mutatingwebhooks")
_KINDS = {"": "pods", "batch": "jobs", "torchrun.ai": "torchrunjobs"}
_POD_LABELS: Mapping[str, str] = {
    names.JOB_LABEL: "train",
    names.INSTANCE_LABEL: "train",
    names.NAME_LABEL: "torchrun",
    names.COMPONENT_LABEL: names.WORKER,
    names.MANAGED_BY_LABEL: names.MANAGED_BY,
}


class RequiredWebhook(NamedTuple):
    """A webhook without whose answer the objects of a job are refused; "" for one with a URL."""

    configuration: str
    kinds: str
    namespace: str
    service: str


def endpoints_key(namespace: str, service: str) -> str:
    """The name of the response with the endpoints of a service."""
    return f"endpoints of {namespace}/{service}"


def webhook_services(snapshot: ClusterSnapshot) -> list[tuple[str, str]]:
    """Namespace and name of the services that answer the required webhooks."""
    found = {
        (webhook.namespace, webhook.service)
        for name in _LISTS
        if not snapshot.is_unreadable(name)
        for webhook in _required_webhooks(snapshot, name)
        if webhook.service
    }
    return sorted(found)


def check_webhooks(snapshot: ClusterSnapshot) -> list[Finding]:
    """Webhooks with failurePolicy Fail, and those whose service has no ready endpoint."""
    findings: list[Finding] = []
    required: list[RequiredWebhook] = []
    for name in _LISTS:
        try:
            required += _required_webhooks(snapshot, name)
        except (ApiError, Unreachable) as error:
            findings.append(unreadable_finding("webhooks", error))
    if not required:
        if not findings:
            text = "No webhook with failurePolicy Fail sees the pods or Jobs of this namespace"
            findings.append(Finding("ok", "webhooks", text))
        return findings
    listed = ", ".join(sorted({f"{hook.configuration} ({hook.kinds})" for hook in required}))
    text = f"failurePolicy Fail: {listed}. While one does not answer, no gang can start"
    findings.append(Finding("note", "webhooks", text))
    for namespace, service in webhook_services(snapshot):
        finding = _check_service(snapshot, namespace, service)
        if finding is not None:
            findings.append(finding)
    return findings


def _check_service(snapshot: ClusterSnapshot, namespace: str, service: str) -> Finding | None:
    key = endpoints_key(namespace, service)
    if key not in snapshot.answers:
        return None
    try:
        slices = snapshot.items(key)
    except (ApiError, Unreachable) as error:
        return unreadable_finding("webhooks", error)
    # A condition that is not set counts as true (k8s.io/api/discovery/v1, EndpointConditions).
    if any(
        field_at(endpoint, "conditions", "ready") is not False
        for item in slices
        for endpoint in items_at(item, "endpoints")
    ):
        return None
    text = (
        f"Service {namespace}/{service} of a webhook has no ready endpoint, so the API server"
        " refuses the objects of jobs"
    )
    fix = f"kubectl get pods -n {namespace}; start its pods, or remove the webhook configuration"
    return Finding("fail", "webhooks", text, fix)


def _required_webhooks(snapshot: ClusterSnapshot, name: str) -> list[RequiredWebhook]:
    labels = _namespace_labels(snapshot)
    found = []
    for item in snapshot.items(name):
        for webhook in items_at(item, "webhooks"):
            kinds = _kinds_of(webhook)
            if (
                kinds
                and field_at(webhook, "failurePolicy") != "Ignore"
                and selects(object_of(webhook, "namespaceSelector"), labels)
                # The selector of objects is known for the labels that the controller sets.
                and (
                    "pods" not in kinds
                    or selects(object_of(webhook, "objectSelector"), _POD_LABELS)
                )
            ):
                service = object_of(webhook, "clientConfig", "service")
                found.append(
                    RequiredWebhook(
                        name_of(item),
                        " and ".join(kinds),
                        text_at(service, "namespace"),
                        text_at(service, "name"),
                    )
                )
    return found


def _namespace_labels(snapshot: ClusterSnapshot) -> Mapping[str, str]:
    known = {"kubernetes.io/metadata.name": snapshot.namespace}
    if snapshot.is_unreadable("namespace"):
        return known
    labels = object_of(snapshot.find("namespace"), "metadata", "labels")
    return known | {key: str(value) for key, value in labels.items()}


def _kinds_of(webhook: JsonObject) -> list[str]:
    """The plurals of the kinds of a job that the rules of a webhook match at their creation."""
    found = []
    for group, plural in _KINDS.items():
        for rule in items_at(webhook, "rules"):
            if (
                {"CREATE", "*"} & set(words_at(rule, "operations"))
                and {group, "*"} & set(words_at(rule, "apiGroups"))
                and {plural, "*", "*/*"} & set(words_at(rule, "resources"))
                and text_at(rule, "scope") != "Cluster"
            ):
                found.append(plural)
                break
    return found


def selects(selector: JsonObject, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (metav1.LabelSelector) matches; an empty one matches everything."""
    matches = object_of(selector, "matchLabels")
    return all(labels.get(key) == value for key, value in matches.items()) and all(
        _holds(term, labels) for term in items_at(selector, "matchExpressions")
    )


def _holds(term: JsonObject, labels: Mapping[str, str]) -> bool:
    value = labels.get(text_at(term, "key"))
    match text_at(term, "operator"):
        case "In":
            return value in words_at(term, "values")
        case "NotIn":
            return value not in words_at(term, "values")
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return True
