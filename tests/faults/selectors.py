"""The label and field selectors that the controller uses."""

from collections.abc import Callable, Mapping
from typing import Any

Match = Callable[[dict[str, Any]], bool]


def matching(query: Mapping[str, str]) -> Match:
    """Whether `labelSelector` and `fieldSelector` of a request select an object."""
    tests = [
        *(_test(term, _label) for term in _terms(query, "labelSelector")),
        *(_test(term, _field) for term in _terms(query, "fieldSelector")),
    ]
    return lambda body: all(test(body) for test in tests)


def _terms(query: Mapping[str, str], name: str) -> list[str]:
    return [term for term in query.get(name, "").split(",") if term]


def _test(term: str, read: Callable[[dict[str, Any], str], str | None]) -> Match:
    name, negated, unwanted = term.partition("!=")
    if negated:
        return lambda body: read(body, name) != unwanted
    name, equal, wanted = term.partition("=")
    if equal:
        return lambda body: read(body, name) == wanted
    return lambda body: read(body, name) is not None


def _label(body: dict[str, Any], name: str) -> str | None:
    value: str | None = (body["metadata"].get("labels") or {}).get(name)
    return value


def _field(body: dict[str, Any], path: str) -> str | None:
    value: Any = body
    for step in path.split("."):
        value = value.get(step, "")
    return str(value)
