"""Doctor's checks of the controller: its Deployment, its leader, its readiness."""

from datetime import UTC, datetime

from kubectl_torchrun.cluster.checks import INSTALL, Finding, Severity, field_at, items_at, unseen
from kubectl_torchrun.cluster.client import Api, ApiError
from kubectl_torchrun.output import duration
from torchrun_api.json import JsonObject

_APPS = "/apis/apps/v1"
_COORDINATION = "/apis/coordination.k8s.io/v1"
_LEASE = "torchrun-controller"
_CONTROLLER = {"labelSelector": "app.kubernetes.io/name=torchrun-controller"}
_LEASE_SECONDS = 60.0  # a leader renews every few seconds
_PORT = 8080
_FAILS, _NOTES = "[-] ", "[!] "  # of /readyz


async def controller(api: Api) -> list[Finding]:
    """Whether the controller runs, one of its replicas leads, and it has what it needs."""
    try:
        deployments = await _listed(api, _APPS, "deployments", _CONTROLLER)
    except ApiError as error:
        return [unseen("controller", error)]
    findings = []
    for item in deployments:
        name, where = (str(field_at(item, "metadata", key)) for key in ("name", "namespace"))
        ready = field_at(item, "status", "readyReplicas") or 0
        wanted = field_at(item, "spec", "replicas")
        containers = items_at(item, "spec", "template", "spec", "containers")
        images = ", ".join(str(field_at(container, "image")) for container in containers)
        text = f"{where}/{name}: {ready} of {wanted} ready, image {images}"
        if ready:
            findings.append(Finding("ok", "controller", text))
        else:
            fix = f"kubectl describe pods -n {where}; kubectl logs deploy/{name} -n {where}"
            findings.append(Finding("fail", "controller", text + await _waits(api, where), fix))
        findings += await _complaints(api, where)
        findings.append(await _leader(api, where))
    return findings or [await _outside(api)]


async def _listed(api: Api, root: str, plural: str, query: dict[str, str]) -> list[JsonObject]:
    """Objects of all namespaces, or of one's own where only these may be seen."""
    try:
        return items_at(await api.read(f"{root}/{plural}", query), "items")
    except ApiError as error:
        if error.status != 403:
            raise
        refused = error
    own = f"{root}/namespaces/{api.namespace}/{plural}"
    try:
        return items_at(await api.read(own, query), "items")
    except ApiError:
        raise refused from None


async def _pods(api: Api, where: str) -> list[JsonObject]:
    try:
        pods = await api.read(f"/api/v1/namespaces/{where}/pods", _CONTROLLER)
    except ApiError:
        return []
    return items_at(pods, "items")


async def _waits(api: Api, where: str) -> str:
    """Why a container of the controller does not run: its own last message, else the kubelet's."""
    for pod in await _pods(api, where):
        for container in items_at(pod, "status", "containerStatuses"):
            for state in ("state", "lastState"):
                if message := field_at(container, state, "terminated", "message"):
                    return f"; {str(message).strip()}"
            if reason := field_at(container, "state", "waiting", "reason"):
                message = field_at(container, "state", "waiting", "message") or ""
                return f"; {reason}: {message}".rstrip(": ")
    return ""


async def _complaints(api: Api, where: str) -> list[Finding]:
    """What the running replicas report in /readyz: missing rights, kinds, the lease."""
    problems: dict[str, Severity] = {}
    for pod in await _pods(api, where):
        if field_at(pod, "status", "phase") != "Running":
            continue
        name = str(field_at(pod, "metadata", "name"))
        try:
            _, body = await api.ask_pod(name, "GET", "/readyz", namespace=where, port=_PORT)
        except ApiError as error:
            return [unseen("readiness", error)]
        for line in body.decode(errors="replace").splitlines():
            if line.startswith(_FAILS):
                problems[line.removeprefix(_FAILS)] = "fail"
            elif line.startswith(_NOTES):
                problems[line.removeprefix(_NOTES)] = "warn"
    return [Finding(severity, "readiness", text) for text, severity in problems.items()]


async def _leader(api: Api, where: str) -> Finding:
    try:
        lease = await api.read(f"{_COORDINATION}/namespaces/{where}/leases/{_LEASE}")
    except ApiError as error:
        if error.status == 404:
            text = f"no lease in {where}: one replica alone, or none ever led"
            return Finding("note", "leader", text)
        return unseen("leader", error)
    text, ago = _renewed(lease)
    if not text:
        return Finding("warn", "leader", "no replica holds the lease", "see the controller's log")
    if ago > _LEASE_SECONDS:
        fix = f"see: kubectl logs -n {where} deploy/torchrun-controller"
        return Finding("fail", "leader", text, fix)
    return Finding("ok", "leader", text)


async def _outside(api: Api) -> Finding:
    """A controller without a Deployment, as `make run` starts one, is known by its lease alone."""
    try:
        named = {"fieldSelector": f"metadata.name={_LEASE}"}
        leases = await _listed(api, _COORDINATION, "leases", named)
    except ApiError:
        leases = []
    for lease in leases:
        text, ago = _renewed(lease)
        if text and ago <= _LEASE_SECONDS:
            where = field_at(lease, "metadata", "namespace")
            return Finding("ok", "controller", f"no Deployment; by its lease in {where}: {text}")
    return Finding("fail", "controller", "no controller is installed", INSTALL)


def _renewed(lease: JsonObject) -> tuple[str, float]:
    """Who holds it, and since how many seconds in silence; "" where nobody does."""
    holder, renewed = (field_at(lease, "spec", key) for key in ("holderIdentity", "renewTime"))
    if not holder or not renewed:
        return "", 0.0
    ago = (datetime.now(UTC) - datetime.fromisoformat(str(renewed))).total_seconds()
    return f"{holder}, renewed {duration(max(int(ago), 0))} ago", ago
