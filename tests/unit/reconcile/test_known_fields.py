"""Kubernetes knows every field that the controller writes: an API server drops others silently.

The models of kubernetes_asyncio judge the objects of the golden files: what they do not know is
lost when they parse an object and write it again.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client

GOLDEN = Path(__file__).parent / "golden"
DOCUMENTS = {
    str(file.relative_to(GOLDEN)): list(yaml.safe_load_all(file.read_text()))
    for file in sorted(GOLDEN.rglob("*.yaml"))
}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a golden file that the library has models of."""
    if isinstance(value, dict) and {"apiVersion", "kind", "metadata"} <= value.keys():
        if hasattr(client, model_of(value)):
            yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from objects(item)


def model_of(body: dict[str, Any]) -> str:
    """The name of a model, such as V1Job."""
    version: str = body["apiVersion"].rpartition("/")[2]
    return f"{version.capitalize()}{body['kind']}"


def fields(value: Any, path: str = "") -> Iterator[str]:
    """The path of each field; all items of a list have the same."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}.{key}"
            yield from fields(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, f"{path}[]")


def unknown(api: client.ApiClient, body: dict[str, Any]) -> set[str]:
    """The fields that the model lacks. Raises ValueError for a missing or invalid value."""
    answer = SimpleNamespace(data=json.dumps(body))
    known = api.sanitize_for_serialization(api.deserialize(answer, model_of(body)))
    return set(fields(body)) - set(fields(known))


@pytest.fixture
async def api() -> AsyncIterator[client.ApiClient]:
    async with client.ApiClient() as opened:
        yield opened


@pytest.mark.parametrize("file", DOCUMENTS)
async def test_every_field_is_known(file: str, api: client.ApiClient) -> None:
    for body in objects(DOCUMENTS[file]):
        assert unknown(api, body) == set(), (body["kind"], body["metadata"]["name"])


def test_the_kinds_that_are_judged() -> None:
    kinds = {body["kind"] for body in objects(list(DOCUMENTS.values()))}
    assert {"Job", "NetworkPolicy", "PersistentVolumeClaim", "Pod", "Secret", "Service"} <= kinds


async def test_an_unknown_field_is_found(api: client.ApiClient) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "c", "restart": "Always"}]},
    }
    assert unknown(api, body) == {".spec.containers[].restart"}
