"""Reads past the caches."""

import pytest

from torchrun_api.json import JsonObject
from torchrun_controller.client import Disconnected
from torchrun_controller.client.reads import LiveReader
from torchrun_controller.client.write_errors import UnavailableError
from unit.client.wire import Wire, refusal


def pod(name: str, uid: str, owner: JsonObject | None = None) -> JsonObject:
    references: list[JsonObject] = [] if owner is None else [{**owner, "controller": True}]
    return {"metadata": {"name": name, "uid": uid, "ownerReferences": references}}  # type: ignore[dict-item]


def child_job(name: str) -> JsonObject:
    return {"kind": "Job", "name": name, "uid": f"uid-{name}"}


async def test_the_workers_of_a_job_are_those_of_its_gangs() -> None:
    pods: JsonObject = {
        "kind": "PartialObjectMetadataList",
        "items": [
            pod("run-0-abcde", "first", child_job("run")),
            pod("run-r1-1-bcdfg", "second", child_job("run-r1")),
            pod("run-0-bcdfg", "orphan"),
            pod("my-debug", "copy"),
            pod("other-0-bcdfg", "other", child_job("other")),
        ],
    }
    wire = Wire(pods)
    found = await LiveReader(wire).find_workers("team", "run")
    assert found == {"first", "second", "orphan"}
    (request,) = wire.requests
    assert (request.method, request.path) == ("GET", "/api/v1/namespaces/team/pods")
    assert request.query == {
        "labelSelector": "torchrun-job-name=run,app.kubernetes.io/component=worker",
        "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed",
    }


async def test_an_empty_list_of_metadata_has_null_as_items() -> None:
    wire = Wire({"kind": "PartialObjectMetadataList", "items": None})
    assert await LiveReader(wire).find_workers("team", "run") == frozenset()


@pytest.mark.parametrize("error", [refusal(503), refusal(429), Disconnected("reset"), b"<html>"])
async def test_pods_that_cannot_be_read_are_not_gone(error: Exception | bytes) -> None:
    with pytest.raises(UnavailableError):
        await LiveReader(Wire(error)).find_workers("team", "run")
