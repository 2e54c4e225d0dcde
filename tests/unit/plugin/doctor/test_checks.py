"""What doctor says about a cluster: objects to lines."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kubectl_torchrun.cluster.client import RequestError, Unreachable
from kubectl_torchrun.doctor.controller import (
    OLDEST_MINOR,
    check_kinds,
    check_skew,
    check_version,
)
from kubectl_torchrun.doctor.queues import (
    check_autoscaler,
    check_claims,
    check_machines,
    check_queues,
    check_schedulers,
    check_storage,
)
from kubectl_torchrun.doctor.snapshot import Answer, ClusterSnapshot, Finding
from torchrun_api.json import JsonObject, JsonValue

from .played import BROKEN, FORBIDDEN, MISSING, groups, items, named, node, play, queue

CHART = Path(__file__).parents[4] / "manifests" / "helm" / "torchrun-controller" / "Chart.yaml"
Check = Callable[[ClusterSnapshot], list[Finding]]
DEFAULT: JsonObject = {"storageclass.kubernetes.io/is-default-class": "true"}
LOCAL = named("local", provisioner="rancher.io/local-path", annotations=DEFAULT)
CEPH = named("block", provisioner="rook-ceph.rbd.csi.ceph.com")
NFS = named("nfs", provisioner="nfs.csi.k8s.io")
OWN = named("own", provisioner="notebs.csi.aws.com")
KINDS: JsonObject = {
    "resources": [
        {"name": name} for name in ("torchrunjobs", "torchrunqueues", "torchrunjobs/status")
    ]
}
GPU_QUEUE = queue(nodeResources={"gpus": 8})
CORDONED = {**node("c"), "spec": {"unschedulable": True}}
LOST = named("l", status={"conditions": [{"type": "Ready", "status": "Unknown"}]})
SHARES = queue("team", quota={"gpus": 8})


def stored(**storage: JsonValue) -> JsonObject:
    """A queue with this storage."""
    return queue(storage={**storage})


def claim(name: str, *modes: str) -> JsonObject:
    return named(name, spec={"accessModes": list(modes)})


def scheduling(**fields: JsonValue) -> JsonObject:
    return items(queue(scheduling={**fields}))


def controller(**container: JsonValue) -> JsonObject:
    return items(named("c", spec={"template": {"spec": {"containers": [{**container}]}}}))


def setting(value: str) -> JsonValue:
    return [{"name": "TORCHRUN_ADMIT_BY_NODES", "value": value}]


# The check, the responses, and the beginning of each line: "VERDICT TEXT -> FIX". A line that ends
# with "|" is whole.
TABLE: list[tuple[Check, dict[str, Answer], list[str]]] = [
    *(
        (check_version, {"version": {"gitVersion": version}}, [line])
        for version, line in (
            ("v1.33.1-eks-1", "ok Kubernetes v1.33.1-eks-1, namespace ns|"),
            ("v1.9.0", "warn Kubernetes v1.9.0 is older than 1.33"),
            ("v1.32.9", "warn Kubernetes v1.32.9 is older than 1.33, the oldest that is supported"
                        " -> Upgrade the cluster"),
            ("v2.0.0", "ok "),
            ("", "ok "),
        )
    ),
    (check_kinds, {"torchrun": MISSING}, ["fail The TorchrunJob CRD is not installed -> Ask an"]),
    (check_kinds, {"torchrun": {"versions": [{"version": "v2"}]}},
        ["fail The cluster serves v2; this plugin needs v1alpha1 -> Install the plugin version"]),
    (check_kinds, {"torchrun": {"versions": [{"version": "v1alpha1"}]}, "kinds": {}},
        ["fail The cluster does not serve torchrunjobs, torchrunjobs/status, torchrunqueues -> "]),
    (check_kinds, {"torchrun": {"versions": [{"version": "v1alpha1"}]}, "kinds": KINDS}, ["ok "]),
    (check_queues, {"queues": MISSING}, []),
    (check_queues, {}, ["fail None in namespace ns -> Create one"]),
    (check_queues, {"queues": items(queue("b", image="i"), queue("a"))},
        ["ok a, b|", "warn Queue a has no image -> Set spec.image"]),
    (check_queues, {"queues": items({"metadata": {"name": "q", "deletionTimestamp": "now"},
                                     "spec": {"image": "i"}})},
        ["ok q|", "warn Queue q is being deleted: it accepts no new jobs and waits for running ones"
         " -> Wait; if no controller runs, remove the finalizer: kubectl patch trq q --type=merge"
         """ -p '{"metadata":{"finalizers":[]}}'|"""]),
    (check_schedulers, {}, ["note Only the default scheduler of Kubernetes|"]),
    (check_schedulers, {"groups": groups("kueue.x-k8s.io", "scheduling.x-k8s.io",
                                         "scheduling.volcano.sh", "scheduling.run.ai")},
        ["ok kai-scheduler, volcano, scheduler-plugins-scheduler (coscheduling),"
         " Kueue (admission; any scheduler)|"]),
    (check_schedulers, {"queues": scheduling(scheduler="volcano")},
        ["note ", "fail Scheduler volcano of a queue is not installed, so its pods stay Pending"
         " -> Install volcano, or change spec.scheduling.scheduler|"]),
    *(
        (check_schedulers, {"queues": scheduling(scheduler=name)}, ["note "])
        for name in ("scheduler-plugins-scheduler", "own", "default-scheduler")
    ),
    (check_schedulers, {"queues": scheduling(gang="kueue")},
        ["note ", "fail Kueue, scheduling.gang of a queue, is not installed: its jobs wait"
         " (GangSchedulerMissing) -> Install Kueue, or set scheduling.gang: none|"]),
    (check_schedulers, {"queues": scheduling(gang="kueue"), "groups": groups("kueue.x-k8s.io")},
        ["ok "]),
    (check_schedulers, {"queues": scheduling(gang="coscheduling")}, ["note ", "fail Coscheduling"]),
    *(
        (check_schedulers, {"queues": scheduling(gang=name)}, ["note "])
        for name in ("native", "none")
    ),
    (check_machines, {"queues": items(GPU_QUEUE)},
        ["fail 0 machines -> Add machines: no job can run|", "note None; queues without GPUs run on CPUs"]),
    (check_machines, {"queues": items(GPU_QUEUE), "groups": groups("karpenter.sh")},
        ["note 0 machines; Karpenter adds them when pods are pending|", "note None"]),
    (check_machines, {"nodes": items(node(gpus="8"), node(gpus="4"), node()),
                      "queues": items(GPU_QUEUE)},
        ["ok 3 machines|", "ok 12 nvidia.com/gpu on 2 machines, at most 8 on one|"]),
    (check_machines, {"nodes": items(node(gpus="8k")), "queues": items(GPU_QUEUE)},
        ["ok 1 machine|", "ok 8000 nvidia.com/gpu on 1 machine, at most 8000 on one|"]),
    *(
        (check_machines, {"nodes": items(node(gpus=amount)), "queues": items(GPU_QUEUE)},
            ["ok 1 machine|", "note None", "fail Queue q requests 8 nvidia.com/gpu for a node, but no"])
        for amount in ("many", "-1", "")
    ),
    (check_machines, {"nodes": items(node(gpus="4", cpu="95800m", memory="1000Gi")),
                      "queues": items(queue(nodeResources={"gpus": 8, "cpus": 96, "memory": "1Ti",
                                                           "extra": {"rdma/hca": 1}}))},
        ["ok 1 machine|", "ok 4 nvidia.com/gpu",
         "fail Queue q requests 1 rdma/hca for a node, but no machine has more than 0 -> Install the"
         " driver and a device plugin (docs/environments.md), add machines, or change the queue|",
         "fail Queue q requests 8 nvidia.com/gpu for a node, but no machine has more than 4"
         " -> Lower nodeResources of the queue, or add machines|",
         "fail Queue q requests 96 cpu for a node, but no machine has more than 95800m -> Lower",
         "fail Queue q requests 1Ti memory for a node, but no machine has more than 1000Gi -> Lower"]),
    *(
        (check_machines, {"nodes": items(node(**{other: "8"})), "queues": items(GPU_QUEUE)},
            ["ok 1 machine|", f"ok 8 {other} on 1 machine",
             "fail Queue q requests 8 nvidia.com/gpu for a node, but no machine has more than 0"
             f" -> Set nodeResources.gpuResourceName to what the machines have: {other}|"])
        for other in ("amd.com/gpu", "nvidia.com/mig-3g.40gb")
    ),
    (check_machines, {"nodes": items(node()), "queues": items(GPU_QUEUE),
                      "cluster_autoscaler": named("cluster-autoscaler-status")},
        ["ok ", "note None", "note Queue q requests 8 nvidia.com/gpu for a node, but no machine has"
         " more than 0 now. cluster-autoscaler can add machines -> Check that one of its node groups"]),
    (check_machines, {"nodes": items(node()), "queues": items(GPU_QUEUE),
                      "cluster_autoscaler": FORBIDDEN},
        ["ok ", "note None", "warn Queue q requests 8 nvidia.com/gpu for a node, but no machine has"
         " more than 0. Whether an autoscaler can add one is not known: no permission to read it"
         " -> Install the driver"]),
    (check_machines, {"nodes": items(node(), CORDONED)},
        ["note 2 machines; 1 not ready or cordoned, such as c -> kubectl get nodes; gangs start on the"
         " others only|", "note None"]),
    (check_machines, {"nodes": items(LOST, CORDONED)},
        ["warn 2 machines; 2 not ready or cordoned, such as l", "note None"]),
    (check_autoscaler, {"queues": items(SHARES)}, ["ok None found: jobs run on the machines that exist|"]),
    (check_autoscaler, {"queues": items(GPU_QUEUE), "groups": groups("karpenter.sh")},
        ["ok Karpenter adds machines for pending pods|"]),
    *(
        (check_autoscaler,
            {"queues": items(SHARES, limiting), "groups": groups("karpenter.sh"),
             "deployments": controller(env=setting("true"))},
            [f"warn Karpenter adds machines for pending pods, but jobs of team, {name} get no pods"
             " before the machines have room for them, so it adds none (WaitingForNodes, ExceedsNodes)"
             " -> Run the controller with --admit-by-nodes=false"])
        for name, limiting in (("w", queue("w", weight=2)), ("c", queue("c", cohort="x")))
    ),
    *(
        (check_autoscaler, {"queues": items(SHARES), "groups": groups("karpenter.sh"),
                            "deployments": controller(**container)}, ["ok "])
        for container in ({"env": setting("false")}, {"args": ["--admit-by-nodes=false"]},
                          {"args": ["--admit-by-nodes", "false"]})
    ),
    (check_autoscaler, {"queues": items(SHARES), "groups": groups("karpenter.sh"),
                        "deployments": FORBIDDEN},
        ["note Karpenter adds machines for pending pods, but jobs of team get no pods before the machines"
         " have room for them, so it adds none (WaitingForNodes, ExceedsNodes). Its setting"
         " --admit-by-nodes could not be read"]),
    (check_storage, {}, ["fail The cluster has no storage class -> Install a provisioner"]),
    (check_storage, {"storageclasses": items(NFS)},
        ["warn No default class; classes: nfs (nfs.csi.k8s.io) -> Set"]),
    (check_storage, {"storageclasses": items(LOCAL, CEPH)},
        ["ok Default local; classes: local (rancher.io/local-path), block (rook-ceph.rbd.csi.ceph",
         "warn No storage class is known to support ReadWriteMany. Code reaches all nodes without"
         " it; checkpoints of several nodes do not -> Install a provisioner with ReadWriteMany"]),
    (check_storage, {"storageclasses": items(LOCAL, OWN)}, ["ok "]),
    *(
        (check_storage, {"storageclasses": items(LOCAL, NFS),
                         "queues": items(stored(checkpoints=checkpoints))}, ["ok "])
        for checkpoints in (
            {}, {"storageClassName": "nfs"}, {"claimName": "mine"}, {"hostPath": "/mnt"},
            {"sizePerGPU": "1Gi", "enabled": False},
            {"sizePerGPU": "1Gi", "accessMode": "ReadWriteOnce"},
        )
    ),
    *(
        (check_storage, {"storageclasses": items(LOCAL, NFS),
                         "queues": items(stored(checkpoints=checkpoints))},
            ["ok ", "warn Queue q has its checkpoints in class local (rancher.io/local-path), which"
             " does not support ReadWriteMany by itself: jobs of several nodes can wait"
             " (ClaimPending) -> Set spec.storage.checkpoints.storageClassName"])
        for checkpoints in (
            {"sizePerGPU": "1Gi"}, {"storageClassName": "local"},
            {"sizePerGPU": "1Gi", "accessMode": "ReadWriteMany"},
        )
    ),
    *(
        (check_storage, {"storageclasses": items(LOCAL, NFS),
                         "queues": items(stored(**{use: {"storageClassName": "fast"}}))},
            ["ok ", f"warn Queue q uses storage class fast for its {use}, which does not exist. The"
             " PVC binds only to a volume that an administrator creates -> Set"
             f" spec.storage.{use}.storageClassName to one of: local, nfs|"])
        for use in ("workspace", "checkpoints")
    ),
    (check_claims, {"queues": items(queue())}, []),
    (check_claims,
        {"claims": items(claim("all", "ReadOnlyMany"), claim("one", "ReadWriteOnce")),
         "queues": items(stored(checkpoints={"claimName": "one"},
                                datasets=[{"name": "d", "claimName": "all"},
                                          {"name": "e", "claimName": "gone"}]))},
        ["warn PVC one, checkpoints of queue q, has the access mode ReadWriteOnce: pods on several"
         " machines cannot mount it -> Use a PVC with ReadWriteMany",
         "warn PVC gone, dataset e of queue q, does not exist: jobs wait -> Create it in namespace"
         " ns, or change claimName|"]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "answers", "expected"), TABLE)
def test_a_cluster_has_these_lines(
    check: Check, answers: dict[str, Answer], expected: list[str]
) -> None:
    lines = [
        f"{f.verdict} {f.text}{f' -> {f.fix}' if f.fix else ''}|" for f in check(play(**answers))
    ]
    assert len(lines) == len(expected), lines
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (check_kinds, "torchrun"),
        (check_queues, "queues"),
        (check_schedulers, "groups"),
        (check_machines, "nodes"),
        (check_autoscaler, "cluster_autoscaler"),
        (check_autoscaler, "groups"),
        (check_storage, "storageclasses"),
        (check_claims, "claims"),
    ],
)
@pytest.mark.parametrize("error", [FORBIDDEN, BROKEN], ids=["forbidden", "broken"])
def test_what_cannot_be_read_is_not_judged(check: Check, answer: str, error: Answer) -> None:
    with pytest.raises((RequestError, Unreachable)):
        check(play(**{answer: error}))


@pytest.mark.parametrize(
    "check", [check_schedulers, check_machines, check_autoscaler, check_storage]
)
def test_queues_that_cannot_be_read_leave_the_rest(check: Check) -> None:
    assert check(play(queues=FORBIDDEN, nodes=items(node()), storageclasses=items(LOCAL, NFS)))


def test_the_oldest_version_is_that_of_the_chart() -> None:
    oldest = re.search(r'kubeVersion: ">=1\.(\d+)', CHART.read_text(encoding="utf-8"))
    assert oldest
    assert int(oldest[1]) == OLDEST_MINOR


@pytest.mark.parametrize(
    ("image", "label", "plugin", "older"),
    [
        ("r/c:0.1.0", "", "0.1.3", ""),
        ("r/c:0.2.0", "", "0.1.0 (checkout)", "plugin"),
        ("r:5000/c:v0.1.0@sha256:00", "", "0.2.0", "controller"),
        ("r/c:0.10.0", "", "0.9.0", "plugin"),
        ("r/c:dev", "", "0.1.0", ""),
        ("r/c:dev", "0.2.0", "0.1.0", "plugin"),
        ("r/c@sha256:00", "0.1.0", "0.1.0", ""),
        ("r/c:0.2.0", "", "unknown", ""),
    ],
)
def test_plugin_and_controller_have_one_minor_version(
    image: str, label: str, plugin: str, older: str
) -> None:
    deployment: JsonObject = {
        "metadata": {"labels": {"app.kubernetes.io/version": label}},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
    }
    findings = check_skew(deployment, plugin)
    assert [finding.fix for finding in findings] == ([f"Upgrade the {older}"] if older else [])
