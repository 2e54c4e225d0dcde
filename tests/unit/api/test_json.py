"""What is looked for in JSON of any shape."""

import pytest

from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at


def test_that_an_object_is_the_very_one() -> None:
    body: JsonObject = {"labels": {}}
    object_at(body, "labels")["a"] = "b"
    assert body == {"labels": {"a": "b"}}


@pytest.mark.parametrize("value", [None, "text", 3, [{"a": "b"}]])
def test_that_what_is_no_object_is_an_empty_one(value: JsonValue) -> None:
    assert object_at({"labels": value}, "labels") == {}
    assert object_at({}, "labels") == {}


def test_that_a_list_is_of_objects_alone() -> None:
    body: JsonObject = {"volumes": [{"name": "a"}, "b", None], "containers": {"name": "a"}}
    assert objects_at(body, "volumes") == [{"name": "a"}]
    assert objects_at(body, "containers") == []
    assert objects_at(body, "env") == []
