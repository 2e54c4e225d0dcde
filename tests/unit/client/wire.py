"""A connection that returns given responses, and intents to write."""

import json
from collections.abc import Mapping

from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import ObjectMeta
from torchrun_api.kinds.resources import PODS, SERVICES
from torchrun_controller.client import ApiError, Response, StatusCause
from torchrun_controller.reconcile.model.plan import Apply, Delete

JOB = TorchrunJob(
    metadata=ObjectMeta(name="run", namespace="team", uid="job-uid", resource_version="41")
)
OWNER: JsonObject = {
    "apiVersion": "torchrun.ai/v1alpha1",
    "kind": "TorchrunJob",
    "name": "run",
    "uid": "job-uid",
    "controller": True,
}


class Request:
    def __init__(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None
    ) -> None:
        self.method, self.path, self.query = method, path, dict(query)
        self.body = json.loads(body or b"{}")


class Wire:
    """Returns the given responses in order, and records the requests."""

    def __init__(self, *answers: JsonObject | bytes | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []
        self.content_types: list[str] = []

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] = {},
        timeout: float = 30.0,  # noqa: ASYNC109 as in Transport.request
    ) -> Response:
        self.requests.append(Request(method, path, query, body))
        self.content_types.append(content_type)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Response(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())


class Open:
    def check(self) -> None:
        pass


def refusal(status: int, message: str = "no", retry_after: float | None = None) -> ApiError:
    return ApiError(status, "Reason", message, retry_after, ())


OTHER_UID = ApiError(
    422, "Invalid", "is invalid", None, (StatusCause("metadata.uid", "field is immutable"),)
)


def answer(uid: str = "u", version: str = "7", **meta: object) -> JsonObject:
    return {"metadata": {"uid": uid, "resourceVersion": version, **meta}}  # type: ignore[dict-item]


def intent(uid: str = "") -> Apply:
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "run", "namespace": "team", "ownerReferences": [OWNER]},
        "spec": {"clusterIP": "None"},
    }
    return Apply(SERVICES, body, uid)


PODS_OF_A_JOB = Delete(
    kind=PODS, namespace="team", name="run", uid="u", grace_seconds=5, collection=True
)
