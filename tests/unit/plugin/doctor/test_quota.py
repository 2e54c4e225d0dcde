"""ResourceQuotas and LimitRanges against the pods of queues."""

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.quota import check_limits, check_quota
from kubectl_torchrun.doctor.snapshot import Answer
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, items, named, only, play, queue, verdicts

RESOURCES: JsonObject = {"gpus": 8, "cpus": 96, "memory": "512Gi", "extra": {"rdma/ib": 8}}
QUEUE = queue(nodeResources=RESOURCES)


def quota(hard: JsonObject, used: JsonObject | None = None, **spec: JsonValue) -> JsonObject:
    return items(named("team", spec={"hard": hard, **spec}, status={"used": used or {}}))


def limits(kind: str, **limit: JsonValue) -> JsonObject:
    return items(named("range", spec={"limits": [{"type": kind, **limit}]}))


@pytest.mark.parametrize(
    ("hard", "text"),
    [
        ({"requests.nvidia.com/gpu": "4"}, "needs 8 nvidia.com/gpu"),
        ({"cpu": "95", "limits.cpu": "500"}, "needs 96 cpu"),
        ({"requests.cpu": "95500m"}, "needs 96 cpu"),
        ({"requests.memory": "511Gi"}, "needs 512Gi memory"),
        ({"limits.memory": "511Gi"}, "needs 512Gi memory"),
        ({"requests.rdma/ib": "4"}, "needs 8 rdma/ib"),
        ({"pods": "0"}, "needs 1 pod, but ResourceQuota team allows 0"),
    ],
)
def test_a_pod_larger_than_the_quota_can_never_start(hard: JsonObject, text: str) -> None:
    findings = check_quota(play(resourcequotas=quota(hard), queues=items(QUEUE)))
    assert text in only(findings, "fail").text


def test_a_quota_with_room_is_fine_and_shown() -> None:
    hard: JsonObject = {"requests.nvidia.com/gpu": "16", "pods": "20", "services": "5"}
    used: JsonObject = {"requests.nvidia.com/gpu": "8", "pods": "1"}
    (found,) = check_quota(play(resourcequotas=quota(hard, used), queues=items(QUEUE)))
    assert found.verdict == "ok"
    assert "requests.nvidia.com/gpu 8 of 16" in found.text


def test_a_quota_of_exactly_one_node_is_enough() -> None:
    hard: JsonObject = {"requests.nvidia.com/gpu": "8", "limits.memory": "512Gi"}
    assert verdicts(check_quota(play(resourcequotas=quota(hard), queues=items(QUEUE)))) == ["ok"]


def test_a_quota_in_use_makes_jobs_wait() -> None:
    hard: JsonObject = {"requests.nvidia.com/gpu": "16"}
    used: JsonObject = {"requests.nvidia.com/gpu": "12"}
    found = only(check_quota(play(resourcequotas=quota(hard, used), queues=items(QUEUE))), "note")
    assert "12 of 16 in ResourceQuota team are in use: jobs wait (QuotaExceeded)" in found.text


DEFAULT_CPU: JsonObject = limits("Container", default={"cpu": "2"})
NO_CPU = queue(nodeResources={"memory": "1Gi"})


@pytest.mark.parametrize(
    ("hard", "queues", "ranges", "warned"),
    [
        ({"limits.cpu": "500"}, QUEUE, items(), "limits.cpu"),
        ({"limits.cpu": "500"}, QUEUE, DEFAULT_CPU, ""),
        ({"limits.cpu": "500"}, QUEUE, FORBIDDEN, ""),
        ({"limits.memory": "900Gi"}, QUEUE, items(), ""),
        ({"limits.memory": "900Gi"}, queue(), items(), "limits.memory"),
        ({"requests.cpu": "500"}, QUEUE, items(), ""),
        ({"requests.cpu": "500"}, NO_CPU, items(), "requests.cpu"),
        ({"cpu": "500"}, NO_CPU, items(), "requests.cpu"),
        ({"cpu": "500"}, NO_CPU, limits("Container", defaultRequest={"cpu": "1"}), ""),
        ({"cpu": "500"}, NO_CPU, DEFAULT_CPU, ""),
        ({"cpu": "500"}, NO_CPU, limits("Pod", defaultRequest={"cpu": "1"}), "requests.cpu"),
    ],
)
def test_a_quota_demands_requests_and_limits(
    hard: JsonObject, queues: JsonObject, ranges: Answer, warned: str
) -> None:
    findings = check_quota(
        play(resourcequotas=quota(hard), limitranges=ranges, queues=items(queues))
    )
    assert ("warn" in verdicts(findings)) is bool(warned)
    if warned:
        assert f"counts {warned}, which pods of queue q do not set" in only(findings, "warn").text


@pytest.mark.parametrize("scope", [{"scopes": ["BestEffort"]}, {"scopeSelector": {"a": []}}])
def test_a_quota_with_a_scope_is_only_shown(scope: JsonObject) -> None:
    hard: JsonObject = {"pods": "0"}
    findings = check_quota(play(resourcequotas=quota(hard, **scope), queues=items(QUEUE)))
    assert verdicts(findings) == ["ok"]


def test_amounts_that_are_not_quantities_are_ignored() -> None:
    hard: JsonObject = {"requests.cpu": "many", "requests.nvidia.com/gpu": None}
    snapshot = play(resourcequotas=quota(hard), queues=items(QUEUE))
    assert verdicts(check_quota(snapshot)) == ["ok"]


@pytest.mark.parametrize(
    ("limit", "verdict", "text"),
    [
        (limits("Container", max={"cpu": "64"}), "fail", "allows 64 cpu for each container"),
        (limits("Pod", max={"memory": "256Gi"}), "fail", "allows 256Gi memory for each pod"),
        (limits("Container", max={"cpu": "96", "memory": "512Gi"}), "ok", "fits the queues"),
        (limits("Container", default={"memory": "1Gi"}), "ok", "fits the queues"),
    ],
)
def test_a_limit_range_bounds_containers(limit: JsonObject, verdict: str, text: str) -> None:
    (found,) = check_limits(play(limitranges=limit, queues=items(QUEUE)))
    assert (found.verdict, text in found.text) == (verdict, True)


def test_a_default_memory_limit_kills_training() -> None:
    limit = limits("Container", default={"memory": "512Mi"})
    found = only(check_limits(play(limitranges=limit, queues=items(queue()))), "warn")
    assert "limits its workers to 512Mi" in found.text


@pytest.mark.parametrize("use", ["workspace", "checkpoints"])
def test_a_limit_range_bounds_claims(use: str) -> None:
    limit = limits("PersistentVolumeClaim", max={"storage": "10Gi"})
    for size, verdict in (("20Gi", "warn"), ("10Gi", "ok")):
        storage: JsonObject = {use: {"size": size}}
        (found,) = check_limits(play(limitranges=limit, queues=items(queue(storage=storage))))
        assert found.verdict == verdict


def test_a_namespace_without_either_is_fine_and_forbidden_lists_are_not() -> None:
    assert verdicts([*check_quota(play()), *check_limits(play())]) == ["ok", "ok"]
    with pytest.raises(ApiError):
        check_quota(play(resourcequotas=FORBIDDEN))
    with pytest.raises(ApiError):
        check_limits(play(limitranges=FORBIDDEN))
