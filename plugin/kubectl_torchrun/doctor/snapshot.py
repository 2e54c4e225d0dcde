"""What a check reports, and the responses of the cluster that the checks read."""

from collections.abc import Awaitable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import anyio

from kubectl_torchrun.cluster.client import Api, RequestError, Unreachable
from kubectl_torchrun.cluster.slices import QUEUES
from torchrun_api.json import JsonObject, JsonValue

Severity = Literal["ok", "note", "skip", "warn", "fail"]
Answer: TypeAlias = JsonObject | RequestError | Unreachable

# Where the Deployment of the controller is read.
DEPLOYMENTS = "/apis/apps/v1/deployments"
CONTROLLER_QUERY = {"labelSelector": "app.kubernetes.io/name=torchrun-controller"}
# By the name under which a check reads the response.
_PATHS: Mapping[str, str] = {
    "version": "/version",
    "groups": "/apis",
    "torchrun": "/apis/torchrun.ai",
    "kinds": "/apis/torchrun.ai/v1alpha1",
    "nodes": "/api/v1/nodes",
    "storageclasses": "/apis/storage.k8s.io/v1/storageclasses",
    "claims": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "cluster-autoscaler": "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status",
}


class Finding(NamedTuple):
    """One line of the report of doctor; `fix` is the next step, if one is needed.

    skip: not checked, because the user may not read it or the request failed.
    """

    verdict: Severity  # the name in the output of -o
    subject: str
    text: str
    fix: str = ""


class ClusterSnapshot(NamedTuple):
    """The responses, by name. A request that failed has its error instead."""

    namespace: str
    answers: Mapping[str, Answer]

    def read(self, name: str) -> JsonObject:
        """The response. Raises the ApiError or Unreachable of its request."""
        answer = self.answers[name]
        if isinstance(answer, RequestError | Unreachable):
            raise answer
        return answer

    def find(self, name: str) -> JsonObject | None:
        """The response, None if it is not found. Raises other errors."""
        answer = self.answers[name]
        if isinstance(answer, RequestError) and answer.status == 404:
            return None
        return self.read(name)

    def is_unreadable(self, name: str) -> bool:
        """Whether the request failed, for a reason other than that nothing was found."""
        try:
            self.find(name)
        except (RequestError, Unreachable):
            return True
        return False

    def items(self, name: str) -> list[JsonObject]:
        """The objects of a list; none if the cluster does not know their kind."""
        return items_at(self.find(name), "items")

    def groups(self) -> frozenset[str]:
        """The API groups that the cluster serves."""
        return frozenset(
            text_at(group, "name") for group in items_at(self.read("groups"), "groups")
        )

    def queues(self) -> list[JsonObject]:
        """The queues of the namespace; none if they cannot be read: `check_queues` says so."""
        return [] if self.is_unreadable("queues") else self.items("queues")


async def read_snapshot(api: Api) -> ClusterSnapshot:
    """Read everything at the same time. A request that fails costs its own response only.

    Raises Unreachable and ApiError if not even the version can be read.
    """
    answers: dict[str, Answer] = {}
    requests: dict[str, Awaitable[JsonObject]] = {
        name: api.read(path.replace("{namespace}", api.namespace)) for name, path in _PATHS.items()
    }
    requests["queues"] = api.read(QUEUES.path(api.namespace))
    requests["deployments"] = api.read(DEPLOYMENTS, CONTROLLER_QUERY)

    async def fill(name: str, request: Awaitable[JsonObject]) -> None:
        try:
            answers[name] = await request
        except (RequestError, Unreachable) as error:
            answers[name] = error

    async with anyio.create_task_group() as tasks:
        for name, request in requests.items():
            tasks.start_soon(fill, name, request)
    snapshot = ClusterSnapshot(api.namespace, answers)
    snapshot.read("version")
    return snapshot


def unreadable_finding(subject: str, error: RequestError | Unreachable) -> Finding:
    """The finding for a subject that cannot be read."""
    if isinstance(error, Unreachable):
        return Finding("skip", subject, f"Not checked: {error}")
    forbidden = error.status == 403
    why = "no permission to read it" if forbidden else "the API server returned an error"
    return Finding("skip", subject, f"Not checked, {why}: {error.message}")


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
