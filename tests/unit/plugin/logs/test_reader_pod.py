"""The pod that reads the logs of a job without running workers."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ..api_server import refusal
from ..claim import ENDED, play_kubelet, remaining_readers, write
from ..laptop import Laptop

pytestmark = pytest.mark.long  # processes


def test_the_claim_of_a_finished_job_is_read_by_a_temporary_pod(
    laptop: Laptop, claim: Path
) -> None:
    laptop.job("run", status=ENDED)
    spec = {"image": "image", "imagePullSecrets": [{"name": "s"}]}
    laptop.server.put("torchrunqueues", "q", spec=spec)
    write(claim, 0, "last words", attempt=0)
    reader_pods = play_kubelet(laptop, phase="Running")
    result = laptop.run("logs", "run", "--previous")
    assert result.exit_code == 0, result.output
    assert result.stdout == "[0] last words\n"
    assert "Reading its PVC with pod run-log-reader-" in result.stderr
    assert not remaining_readers(laptop)
    (pod,) = reader_pods
    body = pod["spec"]
    assert isinstance(body, dict)
    (container,) = body["containers"]
    assert container["volumeMounts"][0]["readOnly"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (container["image"], body["imagePullSecrets"]) == ("image", [{"name": "s"}])
    assert body["securityContext"]["runAsNonRoot"] is True
    assert body["automountServiceAccountToken"] is False
    assert body["volumes"][0]["persistentVolumeClaim"] == {"claimName": "run-workspace"}


POOL = {"key": "pool", "operator": "Exists"}
SPOT = {"key": "spot", "operator": "Exists"}
AFFINITY: dict[str, object] = {
    "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}
}


def read_copies(laptop: Laptop, claim: Path) -> dict[str, Any]:
    """The spec of the pod that reads a copy of a log."""
    write(claim, 0, "x")
    reader_pods = play_kubelet(laptop, phase="Running")
    assert laptop.run("logs", "run", "-p").exit_code == 0
    body = reader_pods[0]["spec"]
    assert isinstance(body, dict)
    return body


def test_the_sync_pods_image_is_preferred(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status=ENDED)
    laptop.server.put("torchrunqueues", "q", spec={"imagePullSecrets": [{"name": "s"}]})
    labels = {"torchrun-job-name": "run", "app.kubernetes.io/component": "sync"}
    containers = [{"name": "sync", "image": "ours"}]
    laptop.server.put(
        "pods", "run-sync-0", metadata={"labels": labels}, spec={"containers": containers}
    )
    body = read_copies(laptop, claim)
    assert body["containers"][0]["image"] == "ours"
    assert body["imagePullSecrets"] == [{"name": "s"}]


@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        ("ReadWriteMany", (None, None)),
        ("ReadWriteOnce", ({"zone": "a", "gpu": "h100"}, AFFINITY)),
    ],
)
def test_the_reader_may_run_where_the_sync_pod_may(
    laptop: Laptop, claim: Path, mode: str, nodes: tuple[object, object]
) -> None:
    """With a PVC for one node, that is where the workers may run."""
    workspace = {"source": "zip"}
    own = {"tolerations": [SPOT], "nodeSelector": {"gpu": "h100"}}
    spec = {"jobQueue": "q", "volumes": {"workspace": workspace}, "scheduling": own}
    laptop.job("run", status=ENDED, spec=spec)
    shared = {
        "tolerations": [POOL],
        "nodeSelector": {"zone": "a", "gpu": "any"},
        "affinity": AFFINITY,
    }
    laptop.server.put("torchrunqueues", "q", spec={"image": "image", "scheduling": shared})
    laptop.server.put("persistentvolumeclaims", "run-workspace", spec={"accessModes": [mode]})
    body = read_copies(laptop, claim)
    assert body["tolerations"] == [POOL, SPOT]
    assert (body.get("nodeSelector"), body.get("affinity")) == nodes


def test_a_job_whose_queue_is_gone_is_read_with_its_own_settings(
    laptop: Laptop, claim: Path
) -> None:
    workspace = {"source": "zip"}
    spec = {"jobQueue": "gone", "volumes": {"workspace": workspace}, "image": "own"}
    laptop.job("run", status=ENDED, spec={**spec, "scheduling": {"tolerations": [SPOT]}})
    body = read_copies(laptop, claim)
    assert body["containers"][0]["image"] == "own"
    assert body["tolerations"] == [SPOT]
    assert "imagePullSecrets" not in body


def test_without_an_image_no_reader_is_created(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status=ENDED)
    result = laptop.run("logs", "run", "-p")
    assert result.exit_code == 4
    assert "Cannot find an image for a pod that reads the PVC: queue q has none." in result.stderr


def test_without_permission_to_read_the_claim_a_pod_still_reads_it(
    laptop: Laptop, claim: Path
) -> None:
    laptop.job("run", status=ENDED)
    laptop.server.put("torchrunqueues", "q", spec={"image": "image"})
    write(claim, 0, "last words")
    play_kubelet(laptop, phase="Running")

    def forbid(request: web.Request) -> web.Response | None:
        is_claim = "/persistentvolumeclaims/" in request.path
        return refusal(403, "persistentvolumeclaims is forbidden") if is_claim else None

    laptop.server.hooks.append(forbid)
    assert laptop.run("logs", "run", "-p").stdout == "[0] last words\n"


def test_a_reader_that_is_still_terminating_is_not_used_again(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status=ENDED)
    laptop.server.put("torchrunqueues", "q", spec={"image": "image"})
    write(claim, 0, "last words")
    reader_pods = play_kubelet(laptop, phase="Running")

    def terminate(request: web.Request) -> web.Response | None:
        if request.method != "DELETE":
            return None
        terminating = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        laptop.server.put("pods", request.path.rpartition("/")[2], metadata=terminating)
        return web.json_response({"kind": "Status", "status": "Success"})

    laptop.server.hooks.append(terminate)
    for _ in range(2):
        assert laptop.run("logs", "run", "-p").stdout == "[0] last words\n"
    assert len(reader_pods) == len(remaining_readers(laptop)) == 2


def test_a_reader_that_is_deleted_during_its_start_is_reported(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status=ENDED)
    laptop.server.put("torchrunqueues", "q", spec={"image": "image"})
    play_kubelet(laptop, phase="Pending")

    def delete(request: web.Request) -> None:
        for name in remaining_readers(laptop):
            laptop.server.delete("pods", name)

    laptop.server.hooks.append(delete)
    result = laptop.run("logs", "run", "-p")
    assert result.exit_code == 4
    assert "cannot read PVC run-workspace: pods" in result.stderr
