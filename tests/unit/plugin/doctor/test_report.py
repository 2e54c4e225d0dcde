"""doctor on healthy and broken clusters."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from click.testing import Result

from kubectl_torchrun.doctor.report import report, summary
from kubectl_torchrun.doctor.snapshot import Finding, Severity

from ..api_server import REVIEWS, refusal
from ..laptop import Laptop
from .healthy import DEPLOYMENT, FRESH, POD, play_cluster

OWN = {"fieldRef": {"fieldPath": "metadata.namespace"}}
HOUR_AGO = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


def findings(result: Result) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(result.stdout)["findings"]
    return listed


def of(result: Result, subject: str) -> list[dict[str, str]]:
    return [finding for finding in findings(result) if finding["subject"] == subject]


def deployed(container: dict[str, object]) -> dict[str, object]:
    """The Deployment with this container."""
    template = {"spec": {"containers": [{"image": "c:1", **container}]}}
    return {**DEPLOYMENT, "spec": {"replicas": 1, "template": template}}


@pytest.mark.long
def test_a_healthy_cluster(laptop: Laptop) -> None:
    play_cluster(laptop)
    result = laptop.run("doctor")
    assert result.exit_code == 0, result.output
    assert "Jobs can run in namespace ns." in result.stderr
    assert not [line for line in result.stdout.splitlines() if line[:4] in ("fail", "warn")]
    for text in (
        *("Kubernetes v1.35.0", "v1alpha1", "1 of 1 ready, image c:1", "pod-1, renewed"),
        *("Default fast", "12 nvidia.com/gpu on 2 machines, at most 8 on one", "volcano"),
        "permissions that the commands need",
    ):
        assert text in result.stdout


DEAD = {**DEPLOYMENT, "status": {}}
NO_IMAGE = {"state": {"waiting": {"reason": "ErrImagePull", "message": "c:1: not found"}}}
STALE = {"spec": {"holderIdentity": "p", "renewTime": HOUR_AGO}}


@pytest.mark.long
def test_a_controller_that_does_not_start_has_a_reason(laptop: Laptop) -> None:
    pods = {"items": [{"status": {"containerStatuses": [NO_IMAGE]}}]}
    play_cluster(laptop, deployments={"items": [DEAD]}, pods=pods)
    assert "0 of 1 ready, image c:1; ErrImagePull: c:1: not found" in laptop.run("doctor").stdout


WRONG = "torchrun-controller: --workers (TORCHRUN_WORKERS) is '0': it must be an integer"
ENDED = {"terminated": {"message": WRONG + "\n"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


@pytest.mark.long
@pytest.mark.parametrize(
    "status", [{"state": ENDED}, {"state": BACK_OFF, "lastState": ENDED}], ids=["ended", "waits"]
)
def test_a_controller_with_a_wrong_setting_is_quoted(
    laptop: Laptop, status: dict[str, object]
) -> None:
    pods = {"items": [{"status": {"containerStatuses": [status]}}]}
    play_cluster(laptop, deployments={"items": [DEAD]}, pods=pods)
    result = laptop.run("doctor", "-o", "json")
    (text,) = [f["text"] for f in findings(result) if WRONG in f["text"]]
    assert text.endswith(f"; {WRONG}")


@pytest.mark.long
@pytest.mark.parametrize(
    "container",
    [
        {"env": [{"name": "TORCHRUN_LEASE_NAME", "value": "team-a"}]},
        {"args": ["--log-level", "debug", "--lease-name", "team-a"]},
        {"args": ["--lease-name=team-a"], "env": [{"name": "TORCHRUN_LEASE_NAME", "value": "b"}]},
    ],
    ids=["variable", "flag", "flag before variable"],
)
def test_the_leader_is_found_by_the_lease_of_the_deployment(
    laptop: Laptop, container: dict[str, object]
) -> None:
    deployment = deployed(container)
    path = "/apis/coordination.k8s.io/v1/namespaces/torchrun-system/leases/team-a"
    lease = {"spec": {"holderIdentity": "pod-a", "renewTime": FRESH}}
    play_cluster(laptop, deployments={"items": [deployment]}, lease=None)
    laptop.server.hooks.append(
        lambda request: web.json_response(lease) if request.path == path else None
    )
    assert "pod-a, renewed" in laptop.run("doctor").stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "code", "verdict", "text"),
    [
        ({"torchrun.ai": None}, 1, "fail", "The TorchrunJob CRD is not installed"),
        ({"deployments": {"items": []}}, 1, "fail", "The controller is not installed"),
        ({"deployments": {"items": [DEAD]}}, 1, "fail", "0 of 1 ready"),
        ({"deployments": 403}, 0, "skip", "no permission to read it: you may not"),
        ({"lease": STALE}, 1, "fail", " ago"),
        ({"lease": None}, 0, "note", "No lease torchrun-controller in namespace torchrun-system"),
        ({"lease": {"spec": {}}}, 0, "warn", "No replica holds the lease"),
        ({"nodes": {"items": [{}]}}, 1, "fail", "requests 8 nvidia.com/gpu for a node, but no"),
    ],
)
def test_each_problem_is_reported(
    laptop: Laptop, changed: dict[str, object], code: int, verdict: str, text: str
) -> None:
    play_cluster(laptop, **changed)
    result = laptop.run("doctor", "-o", "json")
    assert result.exit_code == code, result.output
    assert [f for f in findings(result) if f["verdict"] == verdict and text in f["text"]]
    assert (" failed." in result.stderr) == (code == 1)


@pytest.mark.long
def test_a_controller_of_the_own_namespace_is_found(laptop: Laptop) -> None:
    own = "/apis/apps/v1/namespaces/ns/deployments"
    play_cluster(laptop, deployments=403)
    laptop.server.hooks.append(
        lambda request: web.json_response({"items": [DEPLOYMENT]}) if request.path == own else None
    )
    assert "1 of 1 ready, image c:1" in laptop.run("doctor").stdout


@pytest.mark.long
def test_a_controller_in_a_namespace_that_cannot_be_read_may_be_installed(laptop: Laptop) -> None:
    own = "/apis/apps/v1/namespaces/ns/deployments"
    play_cluster(laptop, deployments=403)
    laptop.server.hooks.append(
        lambda request: web.json_response({"items": []}) if request.path == own else None
    )
    result = laptop.run("doctor", "-o", "json")
    assert result.exit_code == 0
    (found,) = of(result, "controller")
    assert (found["verdict"], "you may not" in found["text"]) == ("skip", True)


@pytest.mark.long
@pytest.mark.parametrize(
    "container",
    [
        {"args": ["--namespace=team-a"]},
        {"env": [{"name": "TORCHRUN_NAMESPACE", "value": "team-a"}]},
        {"env": [{"name": "TORCHRUN_NAMESPACE", "valueFrom": OWN}]},
    ],
    ids=["flag", "variable", "its own"],
)
def test_a_controller_of_another_namespace_is_none(
    laptop: Laptop, container: dict[str, object]
) -> None:
    deployment = deployed(container)
    deployment["metadata"] = {"name": "c", "namespace": "team-a"}
    play_cluster(laptop, deployments={"items": [deployment]})
    result = laptop.run("doctor", "-o", "json")
    assert result.exit_code == 1
    (found,) = of(result, "controller")
    assert found["text"] == "No controller watches namespace ns: team-a/c watches team-a"
    play_cluster(laptop, deployments={"items": [deployment, DEPLOYMENT]})
    laptop.server.hooks.pop(0)
    assert laptop.run("doctor").exit_code == 0


@pytest.mark.long
def test_missing_permissions_of_the_controller(laptop: Laptop) -> None:
    lines = (
        "[+] lease ok\n[-] caches: not listed yet: services (cannot list services)\n"
        "[!] machines: lost machines are not detected\n"
    )
    readyz = f"{POD}:8080/proxy/readyz"
    replica = {"metadata": {"name": "c-1"}, "status": {"phase": "Running"}}
    starting = {"metadata": {"name": "c-2"}, "status": {"phase": "Pending"}}
    play_cluster(laptop, pods={"items": [replica, starting]})
    laptop.server.hooks.append(
        lambda request: web.Response(status=503, text=lines) if request.path == readyz else None
    )
    result = laptop.run("doctor")
    assert result.exit_code == 1
    assert "caches: not listed yet: services (cannot list services)" in result.stdout
    assert "machines: lost machines are not detected" in result.stdout
    laptop.server.hooks[-1] = lambda request: (
        refusal(403, "no proxy for you") if request.path == readyz else None
    )
    result = laptop.run("doctor")
    assert result.exit_code == 0
    assert "no permission to read it: no proxy for you" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("forbidden", "code", "text"),
    [
        ("torchrunjobs create", 1, "No permission to create torchrunjobs (needed for: submit)"),
        ("pods/exec create", 0, "No permission to create pods/exec (needed for: exec"),
    ],
)
def test_each_permission_is_checked(laptop: Laptop, forbidden: str, code: int, text: str) -> None:
    play_cluster(laptop, forbidden=(forbidden,))
    result = laptop.run("doctor")
    assert result.exit_code == code
    assert text in result.stdout
    assert "the role edit in namespace ns" in result.stdout


@pytest.mark.long
def test_reviews_that_are_refused_are_not_permissions(laptop: Laptop) -> None:
    play_cluster(laptop)
    laptop.server.hooks.append(
        lambda request: refusal(403, "no reviews") if request.path == REVIEWS else None
    )
    (found,) = of(laptop.run("doctor", "-o", "json"), "permissions")
    assert (found["verdict"], found["text"][:11]) == ("skip", "Not checked")


@pytest.mark.long
@pytest.mark.parametrize("word", ["apis", "storageclasses", "nodes", "deployments"])
@pytest.mark.parametrize("broken", [403, "not JSON"])
def test_a_request_that_fails_costs_only_the_checks_that_need_it(
    laptop: Laptop, word: str, broken: object
) -> None:
    play_cluster(laptop)
    whole = {f["subject"] for f in findings(laptop.run("doctor", "-o", "json"))}
    laptop.server.hooks.clear()
    play_cluster(laptop, **{word: broken})
    result = laptop.run("doctor", "-o", "json")
    skipped = {f["subject"] for f in findings(result) if f["verdict"] == "skip"}
    assert skipped
    assert {f["subject"] for f in findings(result)} >= whole - {"GPUs", "leader"} - skipped
    assert all(
        f["text"].startswith("Not checked") for f in findings(result) if f["verdict"] == "skip"
    )
    assert "Jobs can run" not in result.stderr
    assert "could not be made" in result.stderr


@pytest.mark.long
def test_requests_are_few(laptop: Laptop) -> None:
    play_cluster(laptop)
    laptop.run("doctor")
    reads = [line for line in laptop.server.requests if line.startswith("GET ")]
    reads.remove("GET /version")  # the session's, which sees whether the cluster answers
    assert len(reads) == len(set(reads)) <= 14, sorted(reads)


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        (("ok", "note", "warn"), "Jobs can run in namespace ns."),
        (("ok", "skip"), "No check failed in namespace ns. 1 check could not be made."),
        (("skip", "skip"), "No check failed in namespace ns. 2 checks could not be made."),
        (("fail", "skip"), "1 check failed. 1 check could not be made."),
        (("fail", "fail"), "2 checks failed."),
    ],
)
def test_the_last_line_does_not_promise_what_was_not_checked(
    verdicts: tuple[Severity, ...], line: str
) -> None:
    assert summary([Finding(verdict, "s", "t") for verdict in verdicts], "ns") == line


def test_a_report_fits_on_the_screen() -> None:
    finding = Finding("fail", "storage", "word " * 30, "do " * 30)
    lines = report([finding], 60)
    assert len(lines) > 4
    assert "→" in "".join(lines)
    assert all(len(line) <= 72 for line in lines)  # with its colour
