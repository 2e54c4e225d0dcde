"""doctor on healthy and broken clusters."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web

from kubectl_torchrun.doctor import installation
from kubectl_torchrun.doctor.findings import Finding, Severity
from kubectl_torchrun.doctor.report import report, summary
from torchrun_api.gang_schedulers import GangSchedulerApi

from ..api_server import Hook, refusal
from ..laptop import Laptop
from .healthy import DEPLOYMENT, FRESH, play_cluster

HOUR_AGO = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


def test_a_healthy_cluster(laptop: Laptop) -> None:
    play_cluster(laptop)
    result = laptop.run("doctor")
    assert result.exit_code == 0, result.output
    assert "Jobs can run in namespace ns." in result.stderr
    assert not [line for line in result.stdout.splitlines() if line[:4] in ("fail", "warn")]
    for text in (
        *("Kubernetes v1.35.0", "v1alpha1", "1 of 1 ready, image c:1", "pod-1, renewed"),
        *("Default fast", "ReadWriteMany: shared"),
        *(
            "12 nvidia.com/gpu on 2 nodes, at most 8 on one",
            "volcano",
            "permissions that the commands need",
        ),
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (("apps", "scheduling.k8s.io"), "Only the default scheduler of Kubernetes"),
        (
            ("kueue.x-k8s.io", "scheduling.x-k8s.io", "scheduling.volcano.sh", "scheduling.run.ai"),
            "kai-scheduler, volcano, scheduler-plugins-scheduler (coscheduling),"
            " Kueue (admission; any scheduler)",
        ),
    ],
)
def test_gang_schedulers_are_listed_by_their_api_groups(
    laptop: Laptop, groups: tuple[str, ...], line: str
) -> None:
    play_cluster(laptop, apis={"groups": [{"name": group} for group in groups]})
    result = laptop.run("doctor", "-o", "json")
    findings = [f for f in json.loads(result.stdout)["findings"] if f["subject"] == "schedulers"]
    assert findings[0]["text"] == line
    missing = [f["text"] for f in findings[1:]]
    assert any("Scheduler volcano of a queue is not installed" in text for text in missing) is (
        "scheduling.volcano.sh" not in groups
    )


@pytest.mark.parametrize("scheduler", ["scheduler-plugins-scheduler", "own", "default-scheduler"])
def test_a_scheduler_without_an_api_group_of_its_own_may_be_installed(
    laptop: Laptop, scheduler: str
) -> None:
    play_cluster(laptop, apis={"groups": []})
    spec = {"image": "i", "scheduling": {"scheduler": scheduler}}
    laptop.server.put("torchrunqueues", "q", spec=spec)
    assert "is not installed" not in laptop.run("doctor").stdout


def test_an_own_scheduler_without_an_api_group_may_be_installed(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GangSchedulerApi(
        name="native", title="Own", pod_scheduler="own", pods_scheduled_by="itself"
    )
    monkeypatch.setattr(installation, "GANG_SCHEDULERS", {"native": own})
    play_cluster(laptop, apis={"groups": []})
    spec = {"image": "i", "scheduling": {"scheduler": "own"}}
    laptop.server.put("torchrunqueues", "q", spec=spec)
    assert "Scheduler own of a queue is not installed" not in laptop.run("doctor").stdout


DEAD = {**DEPLOYMENT, "status": {}}
NO_IMAGE = {"state": {"waiting": {"reason": "ErrImagePull", "message": "c:1: not found"}}}
STALE = {"spec": {"holderIdentity": "p", "renewTime": HOUR_AGO}}
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
PLAIN = {"metadata": {"name": "local"}, "provisioner": "rancher.io/local-path"}


def test_a_controller_that_does_not_start_has_a_reason(laptop: Laptop) -> None:
    pods = {"items": [{"status": {"containerStatuses": [NO_IMAGE]}}]}
    play_cluster(laptop, deployments={"items": [DEAD]}, pods=pods)
    assert "0 of 1 ready, image c:1; ErrImagePull: c:1: not found" in laptop.run("doctor").stdout


WRONG = "torchrun-controller: --workers (TORCHRUN_WORKERS) is '0': it must be an integer"
ENDED = {"terminated": {"message": WRONG + "\n"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


@pytest.mark.parametrize(
    "status", [{"state": ENDED}, {"state": BACK_OFF, "lastState": ENDED}], ids=["ended", "waits"]
)
def test_a_controller_with_a_wrong_setting_is_quoted(
    laptop: Laptop, status: dict[str, object]
) -> None:
    pods = {"items": [{"status": {"containerStatuses": [status]}}]}
    play_cluster(laptop, deployments={"items": [DEAD]}, pods=pods)
    result = laptop.run("doctor", "-o", "json")
    (text,) = [f["text"] for f in json.loads(result.stdout)["findings"] if WRONG in f["text"]]
    assert text.endswith(f"; {WRONG}")


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
    template = {"spec": {"containers": [{"image": "c:1", **container}]}}
    deployment = {**DEPLOYMENT, "spec": {"replicas": 1, "template": template}}
    path = "/apis/coordination.k8s.io/v1/namespaces/torchrun-system/leases/team-a"
    lease = {"spec": {"holderIdentity": "pod-a", "renewTime": FRESH}}
    play_cluster(laptop, deployments={"items": [deployment]}, lease=None)
    laptop.server.hooks.append(
        lambda request: web.json_response(lease) if request.path == path else None
    )
    assert "pod-a, renewed" in laptop.run("doctor").stdout


@pytest.mark.parametrize(
    ("changed", "code", "verdict", "text"),
    [
        ({"torchrun.ai": None}, 1, "fail", "The TorchrunJob CRD is not installed"),
        (
            {"torchrun.ai": {"versions": [{"version": "v2"}]}},
            1,
            "fail",
            "this plugin needs v1alpha1",
        ),
        ({"v1alpha1": {"resources": []}}, 1, "fail", "does not serve torchrunjobs"),
        ({"deployments": {"items": []}}, 1, "fail", "The controller is not installed"),
        ({"deployments": {"items": [DEAD]}}, 1, "fail", "0 of 1 ready"),
        ({"deployments": 403}, 0, "skip", "no permission to read it: you may not"),
        ({"lease": STALE}, 1, "fail", " ago"),
        ({"lease": None}, 0, "note", "No lease torchrun-controller in namespace torchrun-system"),
        ({"lease": {"spec": {}}}, 0, "warn", "No replica holds the lease"),
        ({"storageclasses": {"items": []}}, 1, "fail", "has no storage class"),
        (
            {"storageclasses": {"items": [PLAIN]}},
            0,
            "warn",
            "No storage class is known to support ReadWriteMany",
        ),
        ({"storageclasses": 403}, 0, "skip", "no permission to read it"),
        ({"nodes": {"items": []}}, 1, "fail", "0 nodes"),
        (
            {"nodes": {"items": [{}]}},
            1,
            "fail",
            "requests 8 nvidia.com/gpu for a node, but no node has more than 0",
        ),
        ({"nodes": 403}, 0, "skip", "no permission to read it"),
        ({"apis": {"groups": []}}, 1, "fail", "Scheduler volcano of a queue is not installed"),
        ({"ns": RESTRICTED}, 0, "note", "cannot run as root"),
        ({"ns": None}, 1, "fail", "Namespace ns does not exist"),
        ({"ns": 403}, 0, "skip", "no permission to read it"),
    ],
)
def test_each_problem_is_reported(
    laptop: Laptop, changed: dict[str, object], code: int, verdict: str, text: str
) -> None:
    play_cluster(laptop, **changed)
    result = laptop.run("doctor", "-o", "json")
    assert result.exit_code == code, result.output
    findings = json.loads(result.stdout)["findings"]
    assert [f for f in findings if f["verdict"] == verdict and text in f["text"]], findings
    assert (" failed." in result.stderr) == (code == 1)


def test_a_controller_without_a_deployment_is_found_by_its_lease(laptop: Laptop) -> None:
    lease = {
        "metadata": {"namespace": "default"},
        "spec": {"holderIdentity": "my-machine_1", "renewTime": FRESH},
    }
    play_cluster(laptop, deployments={"items": []})
    laptop.server.hooks.append(leases(lease))
    result = laptop.run("doctor")
    assert result.exit_code == 0, result.output
    assert "No Deployment; lease in namespace default: my-machine_1" in result.stdout
    laptop.server.hooks[-1] = leases({**lease, **STALE})
    assert "The controller is not installed" in laptop.run("doctor").stdout


def test_a_controller_in_a_namespace_that_cannot_be_read_may_be_installed(laptop: Laptop) -> None:
    own = "/apis/apps/v1/namespaces/ns/deployments"

    def answer(request: web.Request) -> web.Response | None:
        if request.path == own:
            return web.json_response({"items": []})
        return refusal(403, "no leases") if request.path.endswith("/leases") else None

    play_cluster(laptop, deployments=403)
    laptop.server.hooks.append(answer)
    result = laptop.run("doctor", "-o", "json")
    assert result.exit_code == 0
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["subject"] == "controller"]
    assert (found["verdict"], "you may not" in found["text"]) == ("skip", True)
    # Deployments can be read and there are none, but the lease of another process cannot.
    laptop.server.hooks.clear()
    play_cluster(laptop, deployments={"items": []})
    laptop.server.hooks.append(answer)
    assert "Not checked, no permission to read it: no leases" in laptop.run("doctor").stdout


def test_a_controller_of_the_own_namespace_is_found(laptop: Laptop) -> None:
    own = "/apis/apps/v1/namespaces/ns/deployments"
    play_cluster(laptop, deployments=403)
    laptop.server.hooks.append(
        lambda request: web.json_response({"items": [DEPLOYMENT]}) if request.path == own else None
    )
    assert "1 of 1 ready, image c:1" in laptop.run("doctor").stdout


def leases(lease: dict[str, object]) -> Hook:
    def answer(request: web.Request) -> web.Response | None:
        path = "/apis/coordination.k8s.io/v1/leases"
        return web.json_response({"items": [lease]}) if request.path == path else None

    return answer


def test_missing_queues_and_queues_without_an_image(laptop: Laptop) -> None:
    play_cluster(laptop)
    laptop.server.put("torchrunqueues", "q", spec={})
    result = laptop.run("doctor")
    assert result.exit_code == 0
    assert "Queue q has no image" in result.stdout
    laptop.server.delete("torchrunqueues", "q")
    result = laptop.run("doctor")
    assert result.exit_code == 1
    assert "None in namespace ns" in result.stdout


def test_a_terminating_queue_shows_how_to_release_it(laptop: Laptop) -> None:
    play_cluster(laptop)
    going = {"deletionTimestamp": FRESH}
    laptop.server.put("torchrunqueues", "old", spec={"image": "i"}, metadata=going)
    result = laptop.run("doctor", "-o", "json")
    (found,) = [f for f in json.loads(result.stdout)["findings"] if "being deleted" in f["text"]]
    assert (found["verdict"], found["text"].split()[:2]) == ("warn", ["Queue", "old"])
    patch = """kubectl patch trq old --type=merge -p '{"metadata":{"finalizers":[]}}'"""
    assert found["fix"].endswith(patch)


def test_requests_are_few(laptop: Laptop) -> None:
    play_cluster(laptop)
    laptop.run("doctor")
    reads = [line for line in laptop.server.requests if line.startswith("GET ")]
    reads.remove("GET /version")  # the session's, which sees whether the cluster answers
    assert len(reads) == len(set(reads)) <= 20, sorted(reads)


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
