"""Checks of doctor for the version of the cluster, the CRDs, the queues and gang schedulers."""

import re

from kubectl_torchrun.doctor.findings import (
    INSTALL,
    Finding,
    field_at,
    items_at,
    name_of,
    text_at,
)
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.gang_schedulers import GANG_SCHEDULERS, GangSchedulerApi

OLDEST_MINOR = 33  # as kubeVersion of the chart


def check_version(snapshot: ClusterSnapshot) -> list[Finding]:
    """The version of the API server, and whether the controller supports it."""
    version = text_at(snapshot.read("version"), "gitVersion")
    match = re.match(r"v1\.(\d+)", version)
    if match and int(match[1]) < OLDEST_MINOR:
        text = f"Kubernetes {version} is older than 1.{OLDEST_MINOR}, the oldest that is supported"
        return [Finding("warn", "cluster", text, "Upgrade the cluster")]
    text = f"Kubernetes {version}, namespace {snapshot.namespace}"
    return [Finding("ok", "cluster", text)]


def check_kinds(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether TorchrunJob and TorchrunQueue are served, and in which versions."""
    group = snapshot.find("torchrun")
    if group is None:
        return [Finding("fail", "kinds", "The TorchrunJob CRD is not installed", INSTALL)]
    versions = [text_at(item, "version") for item in items_at(group, "versions")]
    if "v1alpha1" not in versions:
        text = f"The cluster serves {', '.join(versions)}; this plugin needs v1alpha1"
        return [Finding("fail", "kinds", text, "Install the plugin version of the controller")]
    served = {text_at(item, "name") for item in items_at(snapshot.read("kinds"), "resources")}
    missing = {"torchrunjobs", "torchrunqueues", "torchrunjobs/status"} - served
    if missing:
        text = f"The cluster does not serve {', '.join(sorted(missing))}"
        return [Finding("fail", "kinds", text, INSTALL)]
    return [Finding("ok", "kinds", "TorchrunJob and TorchrunQueue, v1alpha1")]


def check_queues(snapshot: ClusterSnapshot) -> list[Finding]:
    """The queues of the namespace."""
    found = snapshot.find("queues")
    if found is None:
        return []  # reported by check_kinds
    queues = items_at(found, "items")
    if not queues:
        fix = "Create one as in the README, or select another namespace with -n"
        return [Finding("fail", "queues", f"None in namespace {snapshot.namespace}", fix)]
    findings = [Finding("ok", "queues", ", ".join(sorted(map(name_of, queues))))]
    findings += [
        Finding("warn", "queues", f"Queue {name_of(queue)} has no image",
                "Set spec.image, or use --image with each job")
        for queue in queues if not field_at(queue, "spec", "image")
    ]  # fmt: skip
    for name in (name_of(q) for q in queues if field_at(q, "metadata", "deletionTimestamp")):
        text = f"Queue {name} is being deleted: it accepts no new jobs and waits for running ones"
        fix = (
            "Wait; if no controller runs, remove the finalizer: "
            f'kubectl patch trq {name} --type=merge -p \'{{"metadata":{{"finalizers":[]}}}}\''
        )
        findings.append(Finding("warn", "queues", text, fix))
    return findings


def check_schedulers(snapshot: ClusterSnapshot) -> list[Finding]:
    """Gang schedulers that are installed, and those that the queues use."""
    served = snapshot.groups()
    installed = [
        scheduler_text(scheduler)
        for scheduler in GANG_SCHEDULERS.values()
        if scheduler.api_group in served
    ]
    text = ", ".join(installed) or "Only the default scheduler of Kubernetes"
    findings = [Finding("ok" if installed else "note", "schedulers", text)]
    # Without an API group there is no sign of whether a scheduler is installed.
    absent = [s for s in GANG_SCHEDULERS.values() if s.api_group and s.api_group not in served]
    queues = snapshot.queues()
    requested = {text_at(queue, "spec", "scheduling", "scheduler") for queue in queues}
    for name in sorted(
        requested & {s.pod_scheduler for s in absent if s.pods_scheduled_by == "itself"}
    ):
        text = f"Scheduler {name} of a queue is not installed, so its pods stay Pending"
        fix = f"Install {name}, or change spec.scheduling.scheduler"
        findings.append(Finding("fail", "schedulers", text, fix))
    gangs = {text_at(queue, "spec", "scheduling", "gang") for queue in queues}
    for scheduler in absent:
        if scheduler.name in gangs:
            text = (
                f"{scheduler.title}, scheduling.gang of a queue, is not installed: its jobs wait"
                " (GangSchedulerMissing)"
            )
            fix = f"Install {scheduler.title}, or set scheduling.gang: none"
            findings.append(Finding("fail", "schedulers", text, fix))
    return findings


def scheduler_text(scheduler: GangSchedulerApi) -> str:
    """The usual schedulerName of the pods; the title if pods of any scheduler are admitted."""
    name, pod_scheduler = scheduler.name, scheduler.pod_scheduler
    if not pod_scheduler:
        return f"{scheduler.title} (admission; any scheduler)"
    return pod_scheduler if name in pod_scheduler else f"{pod_scheduler} ({name})"
