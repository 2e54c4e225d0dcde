"""What the report of a failed test shows: the objects of its namespace, events and logs."""

import json
from collections.abc import Callable, Iterator

from bodies import Body
from e2e.space import CONTROLLER, Space

LINES = 300
"""Of each log."""
COMPONENTS = (
    "kubelet",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "containerd",
)
SECONDS = 120.0
"""Timeout of one command, so that an unreachable cluster does not delay the suite."""


def gather(space: Space) -> Iterator[tuple[str, str]]:
    """Titles and texts, the most useful ones last, at the end of the report."""
    listed = {kind: items(space, kind) for kind in ("torchrunjobs", "pods", "events")}
    yield from node_logs(space)
    yield from pod_logs(space, listed["pods"])
    log = kubectl_output(space, "logs", *CONTROLLER, "--all-pods", f"--tail={LINES}")
    yield "log of the controller", log
    yield "jobs", kubectl_output(space, "get", "jobs,persistentvolumeclaims", "-o", "wide")
    yield "events", render(listed["events"], event)
    yield "pods", render(listed["pods"], pod)
    yield "torchrunjobs", render(listed["torchrunjobs"], torchrunjob)


def kubectl_output(space: Space, *arguments: str) -> str:
    """The output of kubectl, or the error that prevented it."""
    try:
        return space.kubectl(*arguments, check=False, seconds=SECONDS)
    except Exception as error:  # the error is evidence, too
        return f"kubectl {' '.join(arguments)}: {error!r}"


def items(space: Space, kind: str) -> list[Body] | str:
    """All objects of a kind, or the error."""
    text = kubectl_output(space, "get", kind, "-o", "json")
    try:
        objects: list[Body] = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError):
        return text
    return objects


def render(objects: list[Body] | str, line: Callable[[Body], str]) -> str:
    """The objects in the order of their times."""
    if isinstance(objects, str):
        return objects
    return "\n".join(line(one) for one in sorted(objects, key=changed_at)) or "none"


def changed_at(one: Body) -> str:
    """The last time of an event, or the creation time."""
    return str(
        one.get("lastTimestamp") or one.get("eventTime") or one["metadata"]["creationTimestamp"]
    )


def torchrunjob(job: Body) -> str:
    """Phase, reason, counts and conditions."""
    status = job.get("status", {})
    counts = {key: status.get(key, 0) for key in ("attempt", "restarts", "disruptions")}
    lines = [
        f"{job['metadata']['name']}: {status.get('phase', 'no phase')}"
        f" ({status.get('reason', '')}: {status.get('message', '')}) {counts}"
    ]
    for condition in status.get("conditions", []):
        columns = " ".join(str(condition.get(key, "")) for key in ("type", "status", "reason"))
        lines.append(
            f"  {condition.get('lastTransitionTime')} {columns}: {condition.get('message')}"
        )
    return "\n".join(lines)


def pod(one: Body) -> str:
    """Its phase and node, and each container's state."""
    meta, status = one["metadata"], one.get("status", {})
    ending = f", deleted {meta['deletionTimestamp']}" if "deletionTimestamp" in meta else ""
    node = one["spec"].get("nodeName", "no node")
    lines = [f"{meta['name']}: {status.get('phase')} on {node}{ending} {status.get('message', '')}"]
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(field, []):
            state = json.dumps(container.get("state"))[:600]
            last = json.dumps(container["lastState"])[:300] if container.get("lastState") else ""
            ready, again = container.get("ready"), container.get("restartCount")
            lines.append(
                f"  {container['name']}: ready {ready}, restarts {again}, {state}"
                + (f", before {last}" if last else "")
            )
    lines += [
        f"  {condition['type']} {condition['status']}: {condition.get('message', '')}"
        for condition in status.get("conditions", [])
        if condition.get("status") != "True"
    ]
    return "\n".join(lines)


def event(one: Body) -> str:
    """Time, object, reason and message."""
    about = one.get("involvedObject", {})
    times = f" x{one['count']}" if one.get("count", 1) != 1 else ""
    return (
        f"{changed_at(one)} {one.get('type')} {about.get('kind')}/{about.get('name')}"
        f" {one.get('reason')}{times}: {one.get('message', '')[:300]}"
    )


def pod_logs(space: Space, pods: list[Body] | str) -> Iterator[tuple[str, str]]:
    """Logs of every started container, also from before a restart."""
    if isinstance(pods, str):
        return
    for one in pods:
        name, status = one["metadata"]["name"], one.get("status", {})
        for field in ("initContainerStatuses", "containerStatuses"):
            for container in status.get(field, []):
                if "waiting" in container.get("state", {}) and not container.get("restartCount"):
                    continue
                arguments = (
                    "logs",
                    name,
                    "-c",
                    container["name"],
                    "--timestamps",
                    f"--tail={LINES}",
                )
                yield f"log of {name} {container['name']}", kubectl_output(space, *arguments)
                if container.get("restartCount"):
                    before = kubectl_output(space, *arguments, "--previous")
                    yield f"log of {name} {container['name']} before its restart", before


def node_logs(space: Space) -> Iterator[tuple[str, str]]:
    """Logs of the cluster components, if they run on this machine."""
    if space.cluster.local is None:
        return
    for log in sorted(space.cluster.local.log("kubelet").parent.iterdir()):
        if log.stem.partition("@")[0] in COMPONENTS:
            lines = log.read_text(errors="replace").splitlines()[-LINES:]
            yield f"log of the node's {log.stem}", "\n".join(lines)
