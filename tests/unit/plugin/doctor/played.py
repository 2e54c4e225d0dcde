"""A cluster as values: the responses that the checks of doctor read."""

from kubectl_torchrun.cluster.client import ApiError, Unreachable
from kubectl_torchrun.cluster.slices import Status
from kubectl_torchrun.doctor.findings import Finding
from kubectl_torchrun.doctor.snapshot import Answer, ClusterSnapshot
from torchrun_api.json import JsonObject, JsonValue

FORBIDDEN = ApiError(403, Status(message="you may not"))
MISSING = ApiError(404, Status(message="not found"))
BROKEN = Unreachable("connection lost")
LISTS = (
    *("nodes", "storageclasses", "daemonsets", "resourcequotas", "limitranges", "deployments"),
    *("validatingwebhooks", "mutatingwebhooks", "queues"),
)


def items(*objects: JsonObject) -> JsonObject:
    """A list of the API server."""
    return {"items": list(objects)}


def groups(*names: str) -> JsonObject:
    """The response of /apis."""
    return {"groups": [{"name": name} for name in names]}


def named(name: str, **parts: JsonValue) -> JsonObject:
    """An object with this name; `labels` and `annotations` are of its metadata."""
    metadata: JsonObject = {"name": name}
    for part in ("labels", "annotations"):
        if part in parts:
            metadata[part] = parts.pop(part)
    return {"metadata": metadata, **parts}


def queue(name: str = "q", **spec: JsonValue) -> JsonObject:
    """A TorchrunQueue with this spec."""
    return named(name, spec=spec)


def play(**answers: Answer) -> ClusterSnapshot:
    """A cluster without objects, with these responses; `_` stands for `-` in their names."""
    played: dict[str, Answer] = {
        "version": {"gitVersion": "v1.36.1"},
        "groups": groups("apps"),
        "namespace": named("ns"),
        "cluster-autoscaler": MISSING,
        "openshift-autoscalers": MISSING,
        **{name: items() for name in LISTS},
    }
    played |= {name.replace("_", "-"): answer for name, answer in answers.items()}
    return ClusterSnapshot("ns", played)


def verdicts(findings: list[Finding]) -> list[str]:
    """The verdict of each finding."""
    return [finding.verdict for finding in findings]


def only(findings: list[Finding], verdict: str) -> Finding:
    """The one finding with this verdict."""
    (found,) = [finding for finding in findings if finding.verdict == verdict]
    return found
