"""ResourceQuotas and LimitRanges of the namespace, compared with the pods of the queues.

A worker requests the CPUs, memory and devices of its queue. It has limits for memory and devices,
none for CPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from kubectl_torchrun.doctor.findings import (
    Finding,
    items_at,
    name_of,
    object_of,
    text_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.quantity import QuantityError, parse

_COMPUTE = ("cpu", "memory")


def check_quota(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether one pod of each queue fits into the quotas, and states what they demand."""
    queues = snapshot.queues()
    defaults = _defaults(snapshot)
    findings = []
    for quota in snapshot.items("resourcequotas"):
        spec = object_of(quota, "spec")
        name, hard = name_of(quota), object_of(spec, "hard")
        used = object_of(quota, "status", "used")
        shown = ", ".join(f"{key} {used.get(key, 0)} of {hard[key]}" for key in sorted(hard))
        findings.append(Finding("ok", "quota", f"ResourceQuota {name}: {shown}"))
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue  # it may not count the pods of jobs
        for queue in queues:
            findings += _check_size(name, hard, used, queue)
            findings += _check_demands(name, hard, defaults, queue)
    if not findings:
        findings.append(Finding("ok", "quota", "The namespace has no ResourceQuota"))
    return findings


def check_limits(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether the pods and PVCs of each queue are within the LimitRanges."""
    findings: list[Finding] = []
    for limit_range in snapshot.items("limitranges"):
        name = name_of(limit_range)
        for limit in items_at(limit_range, "spec", "limits"):
            for queue in snapshot.queues():
                findings += _check_limit(name, limit, queue)
    if not findings:
        names = ", ".join(name_of(item) for item in snapshot.items("limitranges"))
        text = f"LimitRange {names} fits the queues" if names else "The namespace has no LimitRange"
        findings.append(Finding("ok", "limits", text))
    return findings


def _requests(queue: JsonObject) -> dict[str, JsonValue]:
    """What a pod of the queue requests, by resource."""
    resources = object_of(queue, "spec", "nodeResources")
    requests = dict(object_of(resources, "extra"))
    if resources.get("gpus"):
        requests[text_at(resources, "gpuResourceName") or "nvidia.com/gpu"] = resources["gpus"]
    for name, field in (("cpu", "cpus"), ("memory", "memory")):
        if resources.get(field) is not None:
            requests[name] = resources[field]
    return requests


def _quantity(value: JsonValue) -> Fraction | None:
    try:
        return parse(value) if isinstance(value, int | str) else None
    except QuantityError:
        return None


def _check_size(
    name: str, hard: JsonObject, used: JsonObject, queue: JsonObject
) -> Iterator[Finding]:
    wanted: Mapping[str, JsonValue] = {**_requests(queue), "pods": 1}
    for resource, request in wanted.items():
        limited = {"memory": ("limits.memory",)}.get(resource, ())
        for key in (resource, f"requests.{resource}", *limited):
            amount, most = _quantity(request), _quantity(hard.get(key))
            if amount is None or most is None:
                continue
            free = most - (_quantity(used.get(key)) or 0)
            what = "pod" if resource == "pods" else resource
            text = f"Each node of queue {name_of(queue)} needs {request} {what}"
            if amount > most:
                fix = f"Raise {key} of ResourceQuota {name}, or lower nodeResources of the queue"
                text += f", but ResourceQuota {name} allows {hard[key]}: no job of it can start"
                yield Finding("fail", "quota", text, fix)
            elif amount > free:
                text += f", but {used.get(key)} of {hard[key]} in ResourceQuota {name} are in use"
                yield Finding("note", "quota", f"{text}: jobs wait (QuotaExceeded)")


def _check_demands(
    name: str, hard: JsonObject, defaults: Sequence[str], queue: JsonObject
) -> Iterator[Finding]:
    """What a quota makes mandatory: it refuses pods that do not state it."""
    requests = _requests(queue)
    stated = {*defaults, *(f"requests.{resource}" for resource in requests)}
    if "memory" in requests:
        stated.add("limits.memory")
    for resource in _COMPUTE:
        demanded = {f"limits.{resource}"} & hard.keys()
        if {resource, f"requests.{resource}"} & hard.keys():
            demanded.add(f"requests.{resource}")
        for key in sorted(demanded - stated):
            text = (
                f"ResourceQuota {name} counts {key}, which pods of queue {name_of(queue)} do not"
                " set: the API server refuses them"
            )
            fix = (
                "Add a LimitRange with a default CPU limit: workers have none"
                if key == "limits.cpu"
                else f"Set nodeResources.{'cpus' if resource == 'cpu' else resource} in the queue"
            )
            yield Finding("warn", "quota", text, fix)


def _defaults(snapshot: ClusterSnapshot) -> list[str]:
    """The keys of quotas that LimitRanges set in containers without them."""
    if snapshot.is_unreadable("limitranges"):
        # Without them nobody knows whether a pod lacks something.
        return [f"{kind}.{resource}" for kind in ("limits", "requests") for resource in _COMPUTE]
    found = []
    for item in snapshot.items("limitranges"):
        for limit in items_at(item, "spec", "limits"):
            if text_at(limit, "type") == "Container":
                found += [f"limits.{key}" for key in object_of(limit, "default")]
                # A default limit is the default request, too.
                for kind in ("default", "defaultRequest"):
                    found += [f"requests.{key}" for key in object_of(limit, kind)]
    return found


def _check_limit(name: str, limit: JsonObject, queue: JsonObject) -> Iterator[Finding]:
    kind = text_at(limit, "type")
    if kind == "PersistentVolumeClaim":
        yield from _check_claims(name, limit, queue)
        return
    requests, most = _requests(queue), object_of(limit, "max")
    for resource, request in requests.items():
        amount, allowed = _quantity(request), _quantity(most.get(resource))
        if amount is not None and allowed is not None and amount > allowed:
            text = (
                f"LimitRange {name} allows {most[resource]} {resource} for each {kind.lower()},"
                f" but queue {name_of(queue)} requests {request}: no pod of it can start"
            )
            fix = "Raise the maximum, or lower nodeResources of the queue"
            yield Finding("fail", "limits", text, fix)
    default = object_of(limit, "default").get("memory")
    if default is not None and "memory" not in requests and kind == "Container":
        text = (
            f"Queue {name_of(queue)} sets no memory, so LimitRange {name} limits its workers to"
            f" {default}: training that needs more is killed (OOMKilled)"
        )
        yield Finding("warn", "limits", text, "Set nodeResources.memory in the queue")


def _check_claims(name: str, limit: JsonObject, queue: JsonObject) -> Iterator[Finding]:
    most = text_at(limit, "max", "storage")
    for use in ("workspace", "checkpoints"):
        size = text_at(queue, "spec", "storage", use, "size")
        amount, allowed = _quantity(size or None), _quantity(most or None)
        if amount is not None and allowed is not None and amount > allowed:
            text = (
                f"LimitRange {name} allows PVCs of {most}, but queue {name_of(queue)} requests"
                f" {size} for its {use}: the API server refuses it"
            )
            fix = f"Raise the maximum, or lower spec.storage.{use}.size"
            yield Finding("warn", "limits", text, fix)
