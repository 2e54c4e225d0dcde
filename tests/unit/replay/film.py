"""A handmade recording: the responses of an API server about a job and its queue."""

import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from frames import frame
from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds import (
    CLAIMS,
    EVENTS,
    JOBS,
    NODES,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    Kind,
)
from torchrun_controller.cache.informer_factory import WARNINGS
from torchrun_controller.replay.play import Decision, Player
from torchrun_controller.replay.tape import Line, read, source_of
from world import DEFAULTS, START

BY_LABEL = (PODS, JOBS, CLAIMS, SERVICES)
NEEDED = (TORCHRUN_JOBS, TORCHRUN_QUEUES, *BY_LABEL)
DISCOVERY: JsonObject = {"kind": "APIGroupDiscoveryList", "items": []}


def source(kind: Kind[Any]) -> str:
    label = names.JOB_LABEL if kind in BY_LABEL else ""
    field = WARNINGS if kind is EVENTS else ""
    return source_of(kind.path(), {"labelSelector": label, "fieldSelector": field})


def job(name: str = "train", **spec: JsonValue) -> JsonObject:
    return user_object("TorchrunJob", name, {"jobQueue": "gpu", "command": "python t.py", **spec})


def queue() -> JsonObject:
    return user_object("TorchrunQueue", "gpu", {"image": "trainer:1"})


def user_object(kind: str, name: str, spec: JsonObject) -> JsonObject:
    metadata: JsonObject = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "generation": 1}
    return {"apiVersion": "torchrun.ai/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


class Film:
    """Lines in the order of their addition, one second apart."""

    def __init__(self) -> None:
        self.now = START
        self.lines: list[JsonObject] = []
        self._version = 0

    def starts(self, *objects: JsonObject) -> "Film":
        """Add discovery and a list of each kind, with these objects."""
        self.answer("/apis", DISCOVERY)
        for kind in (*NEEDED, EVENTS, NODES):
            self.lists(kind, [obj for obj in objects if obj["kind"] == kind.kind])
        return self

    def lists(self, kind: Kind[Any], objects: Iterable[JsonObject] = ()) -> None:
        self._add(kind, opens=True)
        for obj in objects:
            self.event(kind, "ADDED", obj)
        end: JsonObject = {"k8s.io/initial-events-end": "true"}
        self.event(kind, "BOOKMARK", {"metadata": {"name": "", "annotations": end}})

    def event(self, kind: Kind[Any], verb: str, obj: JsonObject) -> None:
        self._add(kind, frame=json.loads(frame(verb, self._versioned(obj))))

    def page(self, kind: Kind[Any], objects: Iterable[JsonObject], token: str, first: bool) -> None:
        items: list[Any] = [self._versioned(obj) for obj in objects]
        metadata = {"resourceVersion": str(self._version), "continue": token}
        self._add(kind, first=first, page={"metadata": metadata, "items": items})

    def text(self, kind: Kind[Any], text: str) -> None:
        self._add(kind, text=text)

    def answer(self, path: str, body: JsonObject) -> None:
        self.lines.append(self._line("apis", path) | {"page": body, "first": True})

    def file(self, **head: object) -> bytes:
        first = {"recording": 1, "controller": "0.1.0", "time": START.isoformat(), **head}
        return b"".join(json.dumps(line).encode() + b"\n" for line in (first, *self.lines))

    def read(self) -> Iterable[Line]:
        return read(io.BytesIO(self.file()))[1]

    async def decisions(self, player: Player | None = None) -> list[Decision]:
        decisions: list[Decision] = []
        await (player or Player(DEFAULTS)).play(self.read(), decisions.append)
        return decisions

    def _add(self, kind: Kind[Any], **content: Any) -> None:
        self.lines.append(self._line(kind.resource, source(kind)) | content)

    def _line(self, resource: str, source: str) -> JsonObject:
        self.now += timedelta(seconds=1)
        return {"time": self.now.isoformat(), "resource": resource, "source": source}

    def _versioned(self, obj: JsonObject) -> JsonObject:
        self._version += 1
        metadata: JsonObject = {
            "creationTimestamp": START.astimezone(UTC).isoformat(),
            **object_at(obj, "metadata"),
            "resourceVersion": str(self._version),
        }
        return {**obj, "metadata": metadata}


def applied(decision: Decision) -> dict[str, JsonObject]:
    """Bodies by resource and name, as the API server would store them."""
    return {
        f"{intent.kind.resource}/{intent.name}": as_kept(intent.body)
        for intent in decision.plan.applies
    }


def as_kept(body: JsonObject) -> JsonObject:
    stored: Any = msgspec.to_builtins(body)
    return {
        **stored,
        "metadata": {**stored["metadata"], "uid": f"uid-of-{stored['metadata']['name']}"},
    }


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)
