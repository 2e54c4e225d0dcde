"""Access to objects and lists in JSON of any shape."""

import pytest

from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at


def test_an_object_is_returned_itself() -> None:
    body: JsonObject = {"labels": {}}
    object_at(body, "labels")["a"] = "b"
    assert body == {"labels": {"a": "b"}}


@pytest.mark.parametrize("value", [None, "text", 3, [{"a": "b"}]])
def test_any_other_value_is_an_empty_object(value: JsonValue) -> None:
    assert object_at({"labels": value}, "labels") == {}
    assert object_at({}, "labels") == {}


def test_a_list_has_objects_only() -> None:
    body: JsonObject = {"volumes": [{"name": "a"}, "b", None], "containers": {"name": "a"}}
    assert objects_at(body, "volumes") == [{"name": "a"}]
    assert objects_at(body, "containers") == []
    assert objects_at(body, "env") == []
