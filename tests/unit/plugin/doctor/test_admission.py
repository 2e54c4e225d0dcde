"""Pod Security levels, policy engines, service meshes, and constraints of OpenShift."""

import pytest

from kubectl_torchrun.cluster.client import ApiError
from kubectl_torchrun.doctor.admission import check_policies, check_security
from kubectl_torchrun.doctor.constraints import GROUP, check_constraints, service_accounts
from kubectl_torchrun.doctor.snapshot import Answer
from torchrun_api.json import JsonObject, JsonValue

from .played import FORBIDDEN, MISSING, groups, items, named, only, play, queue, verdicts

LEVEL = "pod-security.kubernetes.io/enforce"
ROOT = queue()
RESTRICTED = queue(podSecurity="restricted")
HOST = queue(networking={"hostNetwork": True})
LOCAL = queue(storage={"checkpoints": {"hostPath": "/mnt"}})
LOCKS: JsonObject = {"capabilities": {"add": ["IPC_LOCK"]}}
RDMA = queue(securityContext=LOCKS)


@pytest.mark.parametrize(
    ("level", "queues", "text"),
    [
        ("privileged", HOST, ""),
        ("", HOST, ""),
        ("baseline", ROOT, ""),
        ("baseline", HOST, "uses hostNetwork"),
        ("baseline", LOCAL, "has checkpoints in a hostPath"),
        ("baseline", RDMA, "adds the capability IPC_LOCK"),
        ("restricted", ROOT, "does not set podSecurity: restricted"),
        ("restricted", RESTRICTED, ""),
        ("restricted", HOST, "uses hostNetwork and does not set podSecurity: restricted"),
    ],
)
def test_queues_that_a_pod_security_level_refuses(
    level: str, queues: JsonObject, text: str
) -> None:
    labels: JsonValue = {LEVEL: level} if level else {}
    findings = check_security(play(namespace=named("ns", labels=labels), queues=items(queues)))
    assert ("warn" in verdicts(findings)) is bool(text)
    if text:
        assert text in only(findings, "warn").text


def test_a_namespace_that_is_missing_or_forbidden() -> None:
    assert verdicts(check_security(play(namespace=MISSING))) == ["fail"]
    with pytest.raises(ApiError):
        check_security(play(namespace=FORBIDDEN))


NO_ISTIO: JsonObject = {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}}
NO_LINKERD: JsonObject = {"metadata": {"annotations": {"linkerd.io/inject": "disabled"}}}


@pytest.mark.parametrize(
    ("marks", "off", "key"),
    [
        ({"labels": {"istio-injection": "enabled"}}, NO_ISTIO, "sidecar.istio.io/inject"),
        ({"labels": {"istio.io/rev": "stable"}}, NO_ISTIO, "sidecar.istio.io/inject"),
        ({"annotations": {"linkerd.io/inject": "enabled"}}, NO_LINKERD, "linkerd.io/inject"),
    ],
)
def test_the_proxy_of_a_service_mesh_is_turned_off(
    marks: dict[str, JsonValue], off: JsonObject, key: str
) -> None:
    namespace = named("ns", **marks)
    both = items(queue("meshed"), queue("plain", podTemplate=off))
    found = only(check_security(play(namespace=namespace, queues=both)), "warn")
    assert "workers of meshed." in found.text
    assert key in found.fix
    plain = items(queue("plain", podTemplate=off))
    assert "warn" not in verdicts(check_security(play(namespace=namespace, queues=plain)))


@pytest.mark.parametrize(
    ("group", "title"),
    [
        ("kyverno.io", "Kyverno"),
        ("policies.kyverno.io", "Kyverno"),
        ("templates.gatekeeper.sh", "Gatekeeper"),
    ],
)
def test_policy_engines_are_named(group: str, title: str) -> None:
    (found,) = check_policies(play(groups=groups(group)))
    assert found.text.startswith(f"{title} can refuse")
    assert found.verdict == "note"


def test_no_policy_engine_is_no_finding() -> None:
    assert check_policies(play()) == []


def openshift(queues: JsonObject, **usable: Answer) -> list[str]:
    """The verdicts on OpenShift, with the constraints that each service account may use."""
    snapshot = play(groups=groups(GROUP), queues=queues)
    reviews = {f"constraints of {account}": answer for account, answer in usable.items()}
    return verdicts(check_constraints(snapshot._replace(answers={**snapshot.answers, **reviews})))


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [
        ([], "fail"),
        (["nonroot-v2"], "note"),
        (["nonroot"], "note"),
        (["anyuid"], "ok"),
        (["nonroot-v2", "privileged"], "ok"),
    ],
)
def test_service_accounts_need_a_constraint(usable: list[JsonValue], verdict: str) -> None:
    assert openshift(items(ROOT), default={"constraints": usable}) == [verdict]


def test_each_service_account_is_checked_once() -> None:
    queues = items(queue("a"), queue("b"), queue("c", serviceAccountName="trainer"))
    assert service_accounts(play(queues=queues)) == ["default", "trainer"]
    none: JsonObject = {"constraints": []}
    assert openshift(queues, default=none, trainer={"constraints": ["anyuid"]}) == ["fail", "ok"]


def test_reviews_that_are_refused_are_not_checked() -> None:
    with pytest.raises(ApiError):
        openshift(items(ROOT), default=FORBIDDEN)


def test_other_clusters_have_no_constraints() -> None:
    assert check_constraints(play(queues=items(ROOT))) == []
