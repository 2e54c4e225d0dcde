"""Pods, frames and pages as the API server sends them, for tests of the read side."""

import json
from collections.abc import Iterable

from torchrun_api.json import JsonObject, JsonValue


def pod(name: str, version: int, attempt: str = "0", **more: JsonValue) -> JsonObject:
    metadata: JsonObject = {
        "name": name,
        "namespace": "team-a",
        "uid": f"uid-of-{name}",
        "resourceVersion": str(version),
        "labels": {"torchrun.ai/attempt": attempt, "torchrun-job-name": "train"},
    }
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, **more}


def frame(kind: str, obj: JsonObject) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"


def bookmark(version: int, *, end: bool = False) -> bytes:
    annotations: JsonObject = {"k8s.io/initial-events-end": "true"} if end else {}
    metadata: JsonObject = {"resourceVersion": str(version), "annotations": annotations}
    return frame("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata})


def error(code: int, reason: str, message: str = "", retry_after: int = 0) -> bytes:
    return frame("ERROR", status(code, reason, message, retry_after))


def status(code: int, reason: str, message: str = "", retry_after: int = 0) -> JsonObject:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message or f"{reason} for a test",
        "details": {"retryAfterSeconds": retry_after} if retry_after else {},
    }


def page(objects: Iterable[JsonObject], version: int, token: str = "") -> bytes:
    metadata = {"resourceVersion": str(version), **({"continue": token} if token else {})}
    return json.dumps({"kind": "PodList", "metadata": metadata, "items": list(objects)}).encode()
