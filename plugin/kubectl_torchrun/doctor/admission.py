"""What the namespace and its policies refuse: Pod Security, policy engines, service meshes."""

from collections.abc import Iterator, Mapping

from kubectl_torchrun.doctor.findings import (
    Finding,
    field_at,
    name_of,
    object_of,
    text_at,
    words_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.json import JsonObject

_LEVEL = "pod-security.kubernetes.io/enforce"
# By their API groups.
_ENGINES: Mapping[str, str] = {
    "kyverno.io": "Kyverno",
    "policies.kyverno.io": "Kyverno",
    "templates.gatekeeper.sh": "Gatekeeper",
}


def check_security(snapshot: ClusterSnapshot) -> list[Finding]:
    """The Pod Security level that the namespace enforces, and the queues that contradict it."""
    namespace = snapshot.find("namespace")
    if namespace is None:
        fix = "Select another one with -n; see: kubectl get namespaces"
        text = f"Namespace {snapshot.namespace} does not exist"
        return [Finding("fail", "security", text, fix)]
    level = text_at(namespace, "metadata", "labels", _LEVEL)
    if level == "restricted":
        text = "The namespace enforces Pod Security restricted: containers cannot run as root"
        fix = "Set podSecurity: restricted in its queues"
        first = Finding("note", "security", text, fix)
    else:
        first = Finding("ok", "security", f"Pod Security level: {level or 'no label'}")
    return [first, *_check_queues(snapshot, level), *_check_mesh(snapshot, namespace)]


def check_policies(snapshot: ClusterSnapshot) -> list[Finding]:
    """Policy engines, whose policies doctor does not evaluate."""
    engines = sorted({_ENGINES[group] for group in snapshot.groups() & _ENGINES.keys()})
    if not engines:
        return []
    text = (
        f"{' and '.join(engines)} can refuse or change the pods of jobs. A refusal is in the status"
        " of the job (PodsRefused, Rejected); the policies are not checked here"
    )
    fix = "If needed, exempt the pods of jobs by one of their labels (docs/labels.md)"
    return [Finding("note", "policies", text, fix)]


def _check_queues(snapshot: ClusterSnapshot, level: str) -> Iterator[Finding]:
    if level not in ("baseline", "restricted"):
        return
    for queue in snapshot.queues():
        wrong = list(_violations(queue, level))
        if wrong:
            text = (
                f"The namespace refuses pods of queue {name_of(queue)}: it enforces {level}, and"
                f" the queue {' and '.join(wrong)}"
            )
            fix = f"Change the queue, or the label {_LEVEL} of the namespace"
            yield Finding("warn", "security", text, fix)


def _violations(queue: JsonObject, level: str) -> Iterator[str]:
    spec = object_of(queue, "spec")
    if field_at(spec, "networking", "hostNetwork") is True:
        yield "uses hostNetwork"
    if field_at(spec, "storage", "checkpoints", "hostPath"):
        yield "has checkpoints in a hostPath"
    if "IPC_LOCK" in words_at(spec, "securityContext", "capabilities", "add"):
        yield "adds the capability IPC_LOCK"
    if level == "restricted" and spec.get("podSecurity") != "restricted":
        yield "does not set podSecurity: restricted"


def _check_mesh(snapshot: ClusterSnapshot, namespace: JsonObject) -> Iterator[Finding]:
    """Service meshes that add a proxy to the workers, which outlives the command."""
    istio = text_at(namespace, "metadata", "labels", "istio-injection") == "enabled" or text_at(
        namespace, "metadata", "labels", "istio.io/rev"
    )
    linkerd = text_at(namespace, "metadata", "annotations", "linkerd.io/inject") == "enabled"
    for found, title, where, key, value in (
        (istio, "Istio", "labels", "sidecar.istio.io/inject", "false"),
        (linkerd, "Linkerd", "annotations", "linkerd.io/inject", "disabled"),
    ):
        queues = [
            name_of(queue)
            for queue in snapshot.queues()
            if text_at(queue, "spec", "podTemplate", "metadata", where, key) != value
        ]
        if found and queues:
            text = (
                f"{title} adds a proxy to the workers of {', '.join(queues)}. It may keep running"
                " after the command has ended, so that the job never succeeds"
            )
            fix = f'Set podTemplate.metadata.{where} {key}: "{value}" in the queue'
            yield Finding("warn", "security", text, fix)
