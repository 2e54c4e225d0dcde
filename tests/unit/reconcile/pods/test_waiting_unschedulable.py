"""Messages of kube-scheduler and their summaries."""

import pytest

from torchrun_controller.reconcile.pods.waiting import summarize

NOT_HELPFUL = (
    " preemption: 0/12 nodes are available: 4 Preemption is not helpful for scheduling,"
    " 8 No preemption victims found for incoming pod."
)

MESSAGES = {
    "resources and a taint": (
        "0/12 nodes are available: 4 node(s) had untolerated taint {dedicated: infra},"
        " 8 Insufficient nvidia.com/gpu." + NOT_HELPFUL,
        "0 of 12 nodes are available: 8 lack nvidia.com/gpu, 4 tainted (dedicated=infra)",
    ),
    "a taint without a value": (
        "0/1 nodes are available: 1 node(s) had untolerated taint"
        " {node-role.kubernetes.io/control-plane: }. preemption: 0/1 nodes are available:"
        " 1 Preemption is not helpful for scheduling.",
        "0 of 1 nodes are available: 1 tainted (node-role.kubernetes.io/control-plane)",
    ),
    "taints as 1.35 tells them": (
        "0/3 nodes are available: 3 node(s) had untolerated taint(s). no new claims to deallocate,"
        " preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
        "0 of 3 nodes are available: 3 tainted",
    ),
    "a taint as 1.22 tells it": (
        "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) had taint {a: b}, that the pod"
        " didn't tolerate.",
        "0 of 2 nodes are available: 1 lacks cpu, 1 tainted (a=b)",
    ),
    "several resources of a node": (
        "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory.",
        "0 of 1 nodes are available: 1 lacks cpu, 1 lacks memory",
    ),
    "cordoned": (
        "0/1 nodes are available: 1 node(s) were unschedulable.",
        "0 of 1 nodes are available: 1 cordoned",
    ),
    "selector": (
        "0/5 nodes are available: 2 Too many pods, 3 node(s) didn't match Pod's node"
        " affinity/selector. preemption: 0/5 nodes are available: 2 No preemption victims found"
        " for incoming pod, 3 Preemption is not helpful for scheduling.",
        "0 of 5 nodes are available: 3 not matching nodeSelector or affinity, 2 with too many pods",
    ),
    "ports": (
        "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
        "0 of 1 nodes are available: 1 didn't have free ports for the requested pod ports",
    ),
    "topology spread": (
        "0/4 nodes are available: 1 node(s) didn't match pod topology spread constraints (missing"
        " required label), 3 node(s) didn't match pod topology spread constraints.",
        "0 of 4 nodes are available: 3 didn't match pod topology spread constraints,"
        " 1 didn't match pod topology spread constraints (missing required label)",
    ),
    "volumes": (
        "0/3 nodes are available: 1 node(s) exceed max volume count, 2 node(s) had volume node"
        " affinity conflict.",
        "0 of 3 nodes are available: 2 had volume node affinity conflict, 1 exceed max volume count",
    ),
    "pod affinity": (
        "0/2 nodes are available: 1 node(s) didn't match pod affinity rules, 1 node(s) didn't"
        " satisfy existing pods anti-affinity rules.",
        "0 of 2 nodes are available: 1 didn't match pod affinity rules,"
        " 1 didn't satisfy existing pods anti-affinity rules",
    ),
    "before any node is looked at": (
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption:"
        " 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
        "0 of 1 nodes are available: pod has unbound immediate PersistentVolumeClaims",
    ),
    "a claim that is missing": (
        '0/1 nodes are available: persistentvolumeclaim "data" not found. preemption: 0/1 nodes'
        " are available: 1 Preemption is not helpful for scheduling.",
        '0 of 1 nodes are available: persistentvolumeclaim "data" not found',
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_of_the_scheduler_are_summarised(case):
    message, expected = MESSAGES[case]
    assert summarize(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "no nodes available to schedule pods",
        "resources were found for 1 pods while 4 are required for gang scheduling",
        'rejected by admission webhook "queue": 0/4 pods',
        "",
    ],
)
def test_other_messages_are_passed_on_unchanged(message):
    assert summarize(message) == message
