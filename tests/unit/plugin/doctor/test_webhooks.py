"""Webhooks with failurePolicy Fail that see the objects of jobs, and their services."""

import pytest

from kubectl_torchrun.doctor.snapshot import Answer
from kubectl_torchrun.doctor.webhooks import (
    check_webhooks,
    endpoints_key,
    selects,
    webhook_services,
)
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, items, named, only, play, verdicts

SERVICE: JsonObject = {"service": {"namespace": "sys", "name": "hook"}}
PODS: JsonObject = {"operations": ["CREATE"], "apiGroups": [""], "resources": ["pods"]}
KEY = endpoints_key("sys", "hook")


def hook(*rules: JsonObject, **parts: JsonValue) -> JsonObject:
    webhook: JsonObject = {"name": "h", "rules": list(rules), "clientConfig": SERVICE, **parts}
    return items(named("policy", webhooks=[webhook]))


def with_endpoints(listed: JsonObject, answer: Answer) -> list[str]:
    snapshot = play(validatingwebhooks=listed)
    return verdicts(check_webhooks(snapshot._replace(answers={**snapshot.answers, KEY: answer})))


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (PODS, "pods"),
        ({**PODS, "operations": ["*"]}, "pods"),
        ({**PODS, "apiGroups": ["*"], "resources": ["*"]}, "pods and jobs and torchrunjobs"),
        ({**PODS, "apiGroups": ["*"], "resources": ["*/*"]}, "pods and jobs and torchrunjobs"),
        ({**PODS, "apiGroups": ["batch"], "resources": ["jobs"]}, "jobs"),
        ({**PODS, "apiGroups": ["torchrun.ai"], "resources": ["torchrunjobs"]}, "torchrunjobs"),
        ({**PODS, "operations": ["DELETE"]}, ""),
        ({**PODS, "resources": ["pods/exec"]}, ""),
        ({**PODS, "resources": ["services"]}, ""),
        ({**PODS, "apiGroups": ["apps"]}, ""),
        ({**PODS, "scope": "Cluster"}, ""),
        ({**PODS, "scope": "Namespaced"}, "pods"),
    ],
)
@pytest.mark.parametrize("kind", ["validatingwebhooks", "mutatingwebhooks"])
def test_rules_match_the_objects_of_a_job(rule: JsonObject, kinds: str, kind: str) -> None:
    snapshot = play(**{kind: hook(rule)})
    (found,) = check_webhooks(snapshot)
    assert found.verdict == ("note" if kinds else "ok")
    assert not kinds or f"policy ({kinds})" in found.text
    assert webhook_services(snapshot) == ([("sys", "hook")] if kinds else [])


@pytest.mark.parametrize(
    "parts",
    [
        {"failurePolicy": "Ignore"},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}},
        {"objectSelector": {"matchLabels": {"app.kubernetes.io/name": "other"}}},
        {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}},
    ],
)
def test_webhooks_that_do_not_see_the_pods(parts: dict[str, JsonValue]) -> None:
    assert verdicts(check_webhooks(play(mutatingwebhooks=hook(PODS, **parts)))) == ["ok"]


@pytest.mark.parametrize(
    "parts",
    [
        {"failurePolicy": "Fail"},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ns"}}},
        {"namespaceSelector": {"matchLabels": {"team": "a"}}},
        {"objectSelector": {"matchLabels": {"app.kubernetes.io/name": "torchrun"}}},
    ],
)
def test_webhooks_that_see_the_pods(parts: dict[str, JsonValue]) -> None:
    namespace = named("ns", labels={"team": "a"})
    snapshot = play(namespace=namespace, mutatingwebhooks=hook(PODS, **parts))
    assert verdicts(check_webhooks(snapshot)) == ["note"]


def endpoints(*ready: bool | None) -> JsonObject:
    found: list[JsonValue] = [{"conditions": {} if r is None else {"ready": r}} for r in ready]
    return items(named("hook-x", endpoints=found))


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (endpoints(True), []),
        (endpoints(None), []),
        (endpoints(False, True), []),
        (endpoints(False), ["fail"]),
        (endpoints(), ["fail"]),
        (items(), ["fail"]),
        (FORBIDDEN, ["skip"]),
    ],
)
def test_a_service_without_endpoints_stops_every_job(answer: Answer, verdict: list[str]) -> None:
    assert with_endpoints(hook(PODS), answer) == ["note", *verdict]


def test_a_webhook_with_a_url_has_no_service() -> None:
    listed = hook(PODS, clientConfig={"url": "https://hook.example/"})
    assert with_endpoints(listed, FORBIDDEN) == ["note"]


def test_one_list_that_cannot_be_read_costs_only_itself() -> None:
    findings = check_webhooks(play(validatingwebhooks=FORBIDDEN, mutatingwebhooks=hook(PODS)))
    assert verdicts(findings) == ["skip", "note"]
    assert verdicts(check_webhooks(play(validatingwebhooks=FORBIDDEN))) == ["skip"]


def test_without_the_namespace_only_its_name_is_known() -> None:
    selector: JsonObject = {"matchLabels": {"kubernetes.io/metadata.name": "ns"}}
    snapshot = play(namespace=FORBIDDEN, mutatingwebhooks=hook(PODS, namespaceSelector=selector))
    assert only(check_webhooks(snapshot), "note")


@pytest.mark.parametrize(
    ("operator", "values", "matches"),
    [
        ("In", ["a", "b"], True),
        ("In", ["b"], False),
        ("NotIn", ["a"], False),
        ("NotIn", ["b"], True),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_expressions_of_selectors(operator: str, values: list[JsonValue], matches: bool) -> None:
    term: JsonObject = {"key": "team", "operator": operator, "values": values}
    assert selects({"matchExpressions": [term]}, {"team": "a"}) is matches


@pytest.mark.parametrize(("operator", "matches"), [("In", False), ("NotIn", True),
                                                  ("Exists", False), ("DoesNotExist", True)])  # fmt: skip
def test_expressions_on_a_label_that_is_missing(operator: str, matches: bool) -> None:
    term: JsonObject = {"key": "team", "operator": operator, "values": ["a"]}
    assert selects({"matchExpressions": [term]}, {}) is matches
