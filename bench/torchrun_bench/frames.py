"""Watch frames of running pods, with the size of real ones."""

from collections.abc import Iterator

import msgspec

from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.kinds.resources import JOBS
from torchrun_bench.plans import decided

PODS_OF_ALL = 10_000
GANG = 10
CHUNK = 64 * 1024  # the chunk size of a socket
FIRST_VERSION = 9_000_000_000
# Replaced by values of the same length.
VERSION = str(FIRST_VERSION)
JOB, NAME, UID = "job-of-a-pod-00000", "name-of-a-pod-00000", "uid-of-a-pod-00000"


def pod() -> bytes:
    """A MODIFIED frame of a worker, with the fields of reconcile and of other controllers."""
    child = next(apply.body for apply in decided(GANG).applies if apply.kind == JOBS)
    template = msgspec.json.decode(msgspec.json.encode(child))["spec"]["template"]
    metadata: JsonObject = {
        **template["metadata"],
        "name": NAME,
        "generateName": f"{JOB}-0-",
        "namespace": "bench-controller",
        "uid": UID,
        "resourceVersion": VERSION,
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "finalizers": ["batch.kubernetes.io/job-tracking"],
        "ownerReferences": [
            {
                "apiVersion": "batch/v1", "kind": "Job", "name": JOB, "uid": f"owner-{JOB}",
                "controller": True, "blockOwnerDeletion": True,
            }
        ],
    }  # fmt: skip
    labels = metadata["labels"]
    assert isinstance(labels, dict)
    labels["torchrun-job-name"] = JOB
    ready: list[JsonValue] = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z",
         "lastProbeTime": None, "observedGeneration": 1}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady",
                     "PodScheduled")
    ]  # fmt: skip
    container: JsonObject = {
        "name": "trainer", "image": "registry.example.com/team/train:1.2.3", "ready": True,
        "imageID": "registry.example.com/team/train@sha256:" + "0" * 64, "restartCount": 0,
        "started": True, "containerID": "containerd://" + "1" * 64, "lastState": {},
        "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
    }  # fmt: skip
    body: JsonObject = {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {**template["spec"], "nodeName": "node-00"},
        "status": {
            "phase": "Running", "podIP": "10.244.1.2", "podIPs": [{"ip": "10.244.1.2"}],
            "hostIP": "10.0.0.1", "qosClass": "Guaranteed", "conditions": ready,
            "startTime": "2026-01-02T03:04:05Z", "containerStatuses": [container],
        },
    }  # fmt: skip
    metadata["managedFields"] = [
        {"manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
         "time": "2026-01-02T03:04:05Z", "fieldsV1": {f"f:{part}": _fields(body[part])}}
        for manager, part in (("kube-controller-manager", "spec"), ("kubelet", "status"))
    ]  # fmt: skip
    return msgspec.json.encode({"type": "MODIFIED", "object": body})


def _fields(value: object) -> JsonObject:
    """FieldsV1 of a value, as in managedFields."""
    if isinstance(value, dict):
        return {f"f:{name}": _fields(each) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        keyed = [
            (each, each.get("name", each.get("type", number))) for number, each in enumerate(value)
        ]
        return {f'k:{{"name":"{key}"}}': {".": {}, **_fields(each)} for each, key in keyed}
    return {}


def chunks(first: int, events: int) -> Iterator[bytes]:
    """Frames of pods in turn, with increasing resourceVersions."""
    frame = pod()
    rest = bytearray()
    for number in range(first, first + events):
        which = number % PODS_OF_ALL
        line = frame.replace(NAME.encode(), f"name-of-a-pod-{which:05d}".encode())
        line = line.replace(UID.encode(), f"uid-of-a-pod-{which:05d}".encode())
        line = line.replace(JOB.encode(), f"job-of-a-pod-{which // GANG:05d}".encode())
        rest += line.replace(VERSION.encode(), f"{FIRST_VERSION + 1 + number}".encode()) + b"\n"
        if len(rest) >= CHUNK:
            yield bytes(rest)
            rest.clear()
    if rest:
        yield bytes(rest)
