"""What a check reports, and access to fields of JSON objects."""

from typing import Literal, NamedTuple

from kubectl_torchrun.cluster.client import ApiError, Unreachable
from torchrun_api.json import JsonObject, JsonValue

Severity = Literal["ok", "note", "skip", "warn", "fail"]
INSTALL = "Ask an administrator to install it: kubectl apply -f manifests/crd, then the controller"

# Where the Deployment of the controller is read.
DEPLOYMENTS = "/apis/apps/v1/deployments"
CONTROLLER_QUERY = {"labelSelector": "app.kubernetes.io/name=torchrun-controller"}


class Finding(NamedTuple):
    """One line of the report of doctor; `fix` is the next step, if one is needed.

    skip: not checked, because the user may not read it or the request failed.
    """

    verdict: Severity  # the name in the output of -o
    subject: str
    text: str
    fix: str = ""


def unreadable_finding(subject: str, error: ApiError | Unreachable) -> Finding:
    """The finding for a subject that cannot be read."""
    if isinstance(error, ApiError) and error.status == 403:
        return Finding("skip", subject, f"Not checked, no permission to read it: {error.message}")
    if isinstance(error, ApiError):
        return Finding(
            "skip", subject, f"Not checked, the API server returned an error: {error.message}"
        )
    return Finding("skip", subject, f"Not checked: {error}")


def field_at(value: JsonValue, *path: str) -> JsonValue:
    """The field at a path, None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def text_at(value: JsonValue, *path: str) -> str:
    """The field at a path as text, "" where there is none."""
    found = field_at(value, *path)
    return "" if found is None else str(found)


def object_of(value: JsonValue, *path: str) -> JsonObject:
    """The object at a path, an empty one where there is none."""
    found = field_at(value, *path)
    return found if isinstance(found, dict) else {}


def items_at(value: JsonValue, *path: str) -> list[JsonObject]:
    """The objects of the list at a path."""
    items = field_at(value, *path)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def words_at(value: JsonValue, *path: str) -> list[str]:
    """The texts of the list at a path."""
    items = field_at(value, *path)
    return [str(item) for item in items] if isinstance(items, list) else []


def name_of(item: JsonValue) -> str:
    """The name in the metadata of an object."""
    return text_at(item, "metadata", "name")
