"""A healthy cluster, for tests that break a part of it."""

from aiohttp import web

from ..api_server import refusal
from ..laptop import Laptop

POD = "/api/v1/namespaces/torchrun-system/pods/c-1"
FRESH = "2999-01-01T00:00:00+00:00"  # independent of the time of earlier tests
DEPLOYMENT = {
    "metadata": {"name": "torchrun-controller", "namespace": "torchrun-system"},
    "spec": {"replicas": 1, "template": {"spec": {"containers": [{"image": "c:1"}]}}},
    "status": {"readyReplicas": 1},
}
DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}
HEALTHY: dict[str, object] = {
    "/version": {"gitVersion": "v1.35.0"},
    "/apis/torchrun.ai": {"versions": [{"version": "v1alpha1"}]},
    "/apis/torchrun.ai/v1alpha1": {
        "resources": [
            {"name": name} for name in ("torchrunjobs", "torchrunqueues", "torchrunjobs/status")
        ]
    },
    "/apis/apps/v1/deployments": {"items": [DEPLOYMENT]},
    "/apis/coordination.k8s.io/v1/namespaces/torchrun-system/leases/torchrun-controller": {
        "spec": {"holderIdentity": "pod-1", "renewTime": FRESH}
    },
    "/apis/storage.k8s.io/v1/storageclasses": {
        "items": [
            {"metadata": {"name": "fast", "annotations": DEFAULT}, "provisioner": "ebs"},
            {"metadata": {"name": "shared"}, "provisioner": "nfs.csi.k8s.io"},
        ]
    },
    "/api/v1/namespaces/torchrun-system/pods": {"items": []},
    "/api/v1/nodes": {
        "items": [{"status": {"allocatable": {"nvidia.com/gpu": str(n)}}} for n in (0, 8, 4)]
    },
    "/apis": {"groups": [{"name": "scheduling.volcano.sh"}, {"name": "apps"}]},
    "/api/v1/namespaces/ns/persistentvolumeclaims": {"items": []},
}


def play_cluster(laptop: Laptop, *, forbidden: tuple[str, ...] = (), **changed: object) -> None:
    """A healthy cluster with other responses for some paths, by their last part. None: not found."""
    queue = {"image": "i", "nodeResources": {"gpus": 8}, "scheduling": {"scheduler": "volcano"}}
    laptop.server.put("torchrunqueues", "q", spec=queue)

    def answer(request: web.Request) -> web.Response | None:
        if request.path.endswith("/selfsubjectaccessreviews"):
            return None  # a POST: the body is read below
        if request.path not in HEALTHY:
            return None
        word = request.path.rpartition("/")[2].replace("torchrun-controller", "lease")
        body = changed.get(word, HEALTHY[request.path])
        if body == 403:
            return refusal(403, "you may not")
        if isinstance(body, str):
            return web.Response(text=body)
        return refusal(404, "not found") if body is None else web.json_response(body)

    laptop.server.hooks.append(answer)
    laptop.server.forbidden = frozenset(forbidden)
