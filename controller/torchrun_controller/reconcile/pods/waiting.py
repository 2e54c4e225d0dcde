"""Why pods do not start: reasons of scheduler, kubelet, quota and storage, summed up for a gang.

The format of kube-scheduler's messages is that of FitError and its plugins
(kubernetes/pkg/scheduler/framework/types.go, 1.22 to 1.35): "0/12 nodes are available: 4 node(s)
..., 8 Insufficient nvidia.com/gpu. preemption: ...". Volcano writes "unavailable"
(volcano/pkg/scheduler/api/unschedule_info.go).
"""

import re

from torchrun_api.kinds.core import CoreEvent, Job, PersistentVolumeClaim, Pod
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import pods_are, sentence
from torchrun_controller.reconcile.pods.lifecycle import count_scheduled, index_of

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
STARTING = frozenset({"", "PodInitializing", "ContainerCreating"})
CREATE_EVENTS = frozenset({"FailedCreate"})
PROVISIONING_EVENTS = frozenset({"ProvisioningFailed"})
MOUNT_EVENTS = frozenset({"FailedAttachVolume", "FailedMount"})
# Volcano's reason for a pod that has room, while another pod of its gang has none
# (volcano/pkg/scheduler/api/unschedule_info.go).
HAS_ROOM = "Schedulable"
MOST_MESSAGES = 3  # different messages of a gang that are listed

_UNBOUND = "unbound immediate PersistentVolumeClaims"
_NO_CLAIM = re.compile(r'persistentvolumeclaim "(?P<name>[^"]+)" not found')
# apiserver/pkg/admission/plugin/resourcequota/controller.go
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<requested>.*), used: (?P<used>.*),"
    r" limited: (?P<limited>.*)"
)
# The name of the pod changes with each retry, so messages leave it out.
_REFUSED_POD = re.compile(r'^(Error creating: )?(pods? "[^"]*" is forbidden: )?')
# The kubelet's text between two pulls. The error of the pull follows it.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')
_VERDICT = re.compile(r"0/(?P<nodes>\d+) nodes are (?:un)?available: (?P<reasons>.+)", re.DOTALL)
# The reasons why preemption does not help follow. They are about the same machines.
_END_OF_REASONS = ". "
_REASON_SEPARATOR = re.compile(r", (?=\d+ )")
_REASON = re.compile(r"(?P<count>\d+) (?P<reason>.+)", re.DOTALL)
_TAINT = re.compile(
    r"node\(s\) had (?:untolerated )?taint \{(?P<key>[^:}]+): ?(?P<value>[^}]*)\}.*"
)

# Shorter texts for common reasons. The others only lose "node(s)".
_SHORT_REASONS = {
    "Too many pods": "with too many pods",
    "node(s) had untolerated taint(s)": "tainted",
    "node(s) were unschedulable": "cordoned",
    "node(s) didn't match Pod's node affinity/selector": "not matching nodeSelector or affinity",
}


def gang_reason(
    jobs: tuple[Job, ...],
    nodes: int,
    workers: tuple[Pod, ...],
    claims: tuple[PersistentVolumeClaim, ...],
    warnings: tuple[CoreEvent, ...],
) -> Reason | None:
    """Return the first reason in the order of worker indexes, with all workers that have it.

    A worker that has room is named only if no worker has another reason.
    `jobs` create the pods, one for each of `nodes` nodes.
    """
    if len(workers) < nodes:
        events = (_last_event(warnings, job.metadata.uid, CREATE_EVENTS) for job in jobs)
        event = next(filter(None, events), None)
        if event is not None:
            why = explain_refusal(event.message)
            return Reason(why.reason, f"{pods_are(len(workers), nodes)} created. {why.message}")
    pending_pods = [pod for pod in sorted(workers, key=index_of) if pod.status.phase == "Pending"]
    reasons = [
        (pod, reason)
        for pod in pending_pods
        if (reason := pod_reason(pod, claims, warnings)) is not None
    ]
    if not reasons:
        return None
    blocked = (reason for _, reason in reasons if reason.reason != HAS_ROOM)
    first_reason = next(blocked, reasons[0][1])
    pods_by_message: dict[str, list[Pod]] = {}
    for pod, reason in reasons:
        if reason.reason == first_reason.reason:
            pods_by_message.setdefault(reason.message, []).append(pod)
    messages = [
        sentence(f"{_name_pods(pods, nodes)}: {text}") for text, pods in pods_by_message.items()
    ]
    scheduled_text = f"{pods_are(count_scheduled(workers), nodes)} scheduled."
    return Reason(first_reason.reason, " ".join([scheduled_text, *messages[:MOST_MESSAGES]]))


def _name_pods(pods: list[Pod], nodes: int) -> str:
    first_name = pods[0].metadata.name
    if len(pods) == 1:
        return f"Pod {first_name} (index {index_of(pods[0])})"
    return f"{len(pods)} of {nodes} pods (first: {first_name})"


def pod_reason(
    pod: Pod, claims: tuple[PersistentVolumeClaim, ...], warnings: tuple[CoreEvent, ...]
) -> Reason | None:
    """Return why a pod does not start; None if nothing reports a problem.

    `claims` are the PVCs that it mounts. A failed mount no longer matters once the sandbox exists
    (condition PodReadyToStartContainers).
    """
    conditions = {c.type: c for c in pod.status.conditions}
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return _scheduling_reason(scheduled.reason, scheduled.message, claims, warnings)
    if not pod.spec.node_name:
        return next((why for claim in claims if (why := _why_unbound(claim, warnings))), None)
    for container in pod.status.init_container_statuses + pod.status.container_statuses:
        waiting = container.state.waiting
        if waiting is None or waiting.reason in STARTING:
            continue
        reason = "ImagePullFailed" if waiting.reason in IMAGE_REASONS else waiting.reason
        text = _BACK_OFF.sub("", waiting.message) or waiting.reason
        return Reason(reason, sentence(f"container {container.name}: {text}"))
    sandbox = conditions.get("PodReadyToStartContainers")
    mount_event = _last_event(warnings, pod.metadata.uid, MOUNT_EVENTS)
    if mount_event is None or (sandbox is not None and sandbox.status == "True"):
        return None
    advice = " A ReadWriteOnce PVC can be mounted on one machine only. Use ReadWriteMany."
    suffix = advice if "Multi-Attach" in mount_event.message else ""
    return Reason("VolumeNotMounted", sentence(mount_event.message) + suffix)


def _scheduling_reason(
    reason: str,
    message: str,
    claims: tuple[PersistentVolumeClaim, ...],
    warnings: tuple[CoreEvent, ...],
) -> Reason:
    if _UNBOUND in message:
        return _unbound_reason(claims, warnings)
    match = _NO_CLAIM.search(message)
    if match is not None:
        return Reason(
            "ClaimNotFound",
            f"PVC {match['name']} does not exist. Create it or correct the claimName.",
        )
    return Reason(reason or "Unschedulable", sentence(summarize(message)))


def _unbound_reason(
    claims: tuple[PersistentVolumeClaim, ...], warnings: tuple[CoreEvent, ...]
) -> Reason:
    """Return why a PVC of the pod is not bound; the scheduler reported one that is not."""
    pending_claims = [claim for claim in claims if claim.status.phase == "Pending"]
    reasons = [_why_unbound(claim, warnings) or _binding_reason(claim) for claim in pending_claims]
    default_reason = Reason(
        "ClaimPending", "a PVC of the pod is not bound yet (see kubectl get pvc)."
    )
    return reasons[0] if reasons else default_reason


def _binding_reason(claim: PersistentVolumeClaim) -> Reason:
    return Reason(
        "ClaimPending",
        f"{_describe(claim)} is not bound yet (see kubectl describe pvc {claim.metadata.name}).",
    )


def binding_failure(claim: PersistentVolumeClaim, warnings: tuple[CoreEvent, ...]) -> Reason | None:
    """Return why the PVC cannot be bound; None where it only waits for its first pod.

    The API server fills in the default storage class: a PVC without a class shows that there is
    none.
    """
    if claim.status.phase != "Pending":
        return None
    event = _last_event(warnings, claim.metadata.uid, PROVISIONING_EVENTS)
    if event is not None:
        return Reason("ProvisioningFailed", sentence(f"{_describe(claim)}: {event.message}"))
    if claim.spec.storage_class_name is None:
        text = f"{_describe(claim)} has no storage class and the cluster has no default class."
        return Reason("NoStorageClass", text)
    return None


def _why_unbound(claim: PersistentVolumeClaim, warnings: tuple[CoreEvent, ...]) -> Reason | None:
    """Return the same with what to do: a PVC that exists keeps its class."""
    why = binding_failure(claim, warnings)
    if why is None or why.reason != "NoStorageClass":
        return why
    advice = (
        f"Set storageClassName, then delete the PVC (kubectl delete pvc {claim.metadata.name})."
    )
    return Reason(why.reason, f"{why.message} {advice}")


def _describe(claim: PersistentVolumeClaim) -> str:
    facts = list(claim.spec.access_modes)
    if claim.spec.storage_class_name:
        facts.insert(0, f"storage class {claim.spec.storage_class_name}")
    return f"PVC {claim.metadata.name} ({', '.join(facts)})"


def explain_refusal(message: str) -> Reason:
    """Return the reason why the API server refused an object: quota, Pod Security or another."""
    text = _REFUSED_POD.sub("", message)
    quota = _QUOTA.search(text)
    if quota is not None:
        return Reason(
            "QuotaExceeded",
            f"ResourceQuota {quota['name']} is exhausted: requested {quota['requested']};"
            f" used {quota['used']}; limited to {quota['limited']}.",
        )
    message = sentence(f"The API server refused the pod: {text}")
    if 'violates PodSecurity "restricted' in text:
        message += " Set podSecurity of the TorchrunQueue to restricted."
    if "violates PodSecurity" in text:
        return Reason("PodSecurity", message)
    return Reason("PodsRefused", message)


def _last_event(
    warnings: tuple[CoreEvent, ...], uid: str, reasons: frozenset[str]
) -> CoreEvent | None:
    """Return the last event about the object with one of these reasons."""
    events = (w for w in reversed(warnings) if w.involved_object.uid == uid and w.reason in reasons)
    return next(events, None)


def summarize(message: str) -> str:
    """Return the message in a line, the largest count first; another format is left as it is."""
    verdict = _VERDICT.fullmatch(message.strip())
    if verdict is None:
        return message
    reasons = verdict["reasons"].partition(_END_OF_REASONS)[0].removesuffix(".")
    matches = [_REASON.fullmatch(part) for part in _REASON_SEPARATOR.split(reasons)]
    counts = [(int(match["count"]), match["reason"]) for match in matches if match is not None]
    if len(counts) < len(matches):
        # A PreFilter plugin gives one reason for all machines, without a count.
        return f"0 of {verdict['nodes']} nodes are available: {reasons}"
    counts.sort(key=lambda entry: -entry[0])
    text = ", ".join(f"{count} {_shorten(count, reason)}" for count, reason in counts)
    return f"0 of {verdict['nodes']} nodes are available: {text}"


def _shorten(count: int, reason: str) -> str:
    taint = _TAINT.fullmatch(reason)
    if taint is not None:
        value = taint["value"].strip()
        return f"tainted ({taint['key']}={value})" if value else f"tainted ({taint['key']})"
    if reason.startswith("Insufficient "):
        lack = "lacks" if count == 1 else "lack"
        return f"{lack} {reason.removeprefix('Insufficient ')}"
    return _SHORT_REASONS.get(reason, reason.removeprefix("node(s) "))
