"""Reasons why a gang waits. Each is in the status, in a condition and in one event."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds.core import ContainerState, ContainerStatus, StateWaiting
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.resources import CLAIMS, JOBS, PODS
from torchrun_controller.reconcile import Rejection, reconcile
from torchrun_controller.reconcile.model.observed import RefusedWrites
from torchrun_controller.reconcile.pods.waiting import explain_refusal
from world import DEFAULTS, ZIP, World, make_job, make_queue

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
QUOTA = (
    'Error creating: pods "train-0-x2x4z" is forbidden: exceeded quota: team,'
    " requested: cpu=2,requests.nvidia.com/gpu=8, used: cpu=0,requests.nvidia.com/gpu=8,"
    " limited: cpu=9,requests.nvidia.com/gpu=8"
)
POD_SECURITY = (
    'Error creating: pods "train-0-x2x4z" is forbidden: violates PodSecurity "restricted:latest":'
    ' runAsNonRoot != true (pod or container "trainer" must set securityContext.runAsNonRoot=true)'
)

REFUSED = "The API server refused the pod:"


def gang(nodes: int = 4, **spec: object) -> World:
    world = World(make_job(numNodes=nodes, **spec), make_queue())
    world.settle()
    return world


def without_pods(world: World, *names: str) -> None:
    for key in [key for key in world.objects if key[0] == PODS.plural]:
        if not names or key[1] in names:
            del world.objects[key]


def test_workers_with_the_same_reason_share_one_message():
    world = gang()
    world.all_workers("Running")
    world.not_placed(NO_GPU, 1, 2, 3)
    world.settle()
    assert world.job.status.message == (
        "1 of 4 pods is scheduled. 3 of 4 pods (first: train-1-abcde):"
        " 0 of 3 nodes are available: 3 lack nvidia.com/gpu."
    )


def test_the_message_of_kai_becomes_one_line():
    world = gang(1)
    # The format of KAI 0.12, pkg/scheduler/api.
    lines = (
        "no nodes with enough resources were found: 2 node(s) didn't have enough resources: memory.",
        "6 node(s) didn't have enough resources: GPUs.",
    )
    world.not_placed(" \n".join(lines), 0)
    world.settle()
    message = world.job.status.message
    assert message == f"0 of 1 pod is scheduled. Pod train-0-abcde (index 0): {' '.join(lines)}"


def test_different_reasons_are_listed_up_to_a_limit():
    world = gang(6)
    for index in range(5):
        world.not_placed(f"0/9 nodes are available: {index + 1} Insufficient cpu.", index)
    world.settle()
    assert world.job.status.message.count("Pod train-") == 3
    assert world.job.status.message.startswith(
        "0 of 6 pods are scheduled. Pod train-0-abcde (index 0)"
    )


def test_with_different_reasons_the_first_worker_counts():
    world = gang(2)
    world.container_waits("train-0-abcde", "ErrImagePull", "no such image")
    world.not_placed(NO_GPU, 1)
    world.settle()
    assert world.job.status.reason == "ImagePullFailed"
    assert "lack" not in world.job.status.message


VOLCANO_ROOM = (
    "Pod team/train-0-abcde can possibly be assigned to node-2, once minAvailable is satisfied"
)


def test_a_pod_that_has_room_does_not_hide_the_one_that_has_none():
    world = gang(2)
    world.not_placed(VOLCANO_ROOM, 0, reason="Schedulable")
    world.not_placed("0/3 nodes are unavailable: 3 Insufficient cpu.", 1)
    world.settle()
    status = world.job.status
    assert status.reason == "Unschedulable"
    assert status.message == (
        "0 of 2 pods are scheduled. Pod train-1-abcde (index 1):"
        " 0 of 3 nodes are available: 3 lack cpu."
    )


def test_pods_that_all_have_room_are_reported():
    world = gang(1)
    world.not_placed(VOLCANO_ROOM, 0, reason="Schedulable")
    world.settle()
    assert world.job.status.reason == "Schedulable"
    assert VOLCANO_ROOM in world.job.status.message


def test_an_image_that_cannot_be_pulled_has_one_message_between_tries_and_at_each():
    world, text = gang(1), 'failed to resolve "i:1": not found'
    world.container_waits("train-0-abcde", "ErrImagePull", text)
    world.settle()
    message = world.job.status.message
    back_off = f'Back-off pulling image "i:1": ErrImagePull: {text}'
    world.container_waits("train-0-abcde", "ImagePullBackOff", back_off)
    world.settle()
    assert world.job.status.message == message
    assert message.endswith(f"{text}.")


@pytest.mark.parametrize(
    "reason", ["CreateContainerConfigError", "CreateContainerError", "RunContainerError"]
)
def test_a_container_that_cannot_be_created_is_a_warning(reason):
    world = gang(1)
    world.container_waits("train-0-abcde", reason, 'secret "token" not found')
    events = world.step().events
    assert [(event.type, event.reason) for event in events] == [("Warning", reason)]


def test_a_message_with_changed_counts_is_one_event():
    world = gang(2)
    world.not_placed(NO_GPU, 0, 1)
    assert [event.reason for event in world.step().events] == ["Unschedulable"]
    world.not_placed(NO_GPU.replace("3 ", "2 "), 0, 1)
    plan = world.step()
    assert (plan.status is not None, plan.events) == (True, ())


def test_pods_behind_a_scheduling_gate_are_reported():
    world = gang(1)
    world.not_placed("Scheduling is blocked", 0, reason="SchedulingGated")
    assert [event.type for event in world.step().events] == ["Normal"]
    assert world.job.status.reason == "SchedulingGated"


def test_a_quota_that_refuses_all_pods_is_reported():
    world = gang(2)
    without_pods(world)
    world.settle()
    assert world.job.status.reason == "WorkersStarting", "the Job may be new"
    world.warn(JOBS, "train", "FailedCreate", QUOTA)
    assert [event.type for event in world.step().events] == ["Warning"]
    assert world.job.status.reason == "QuotaExceeded"
    assert world.job.status.message == (
        "0 of 2 pods are created. ResourceQuota team is exhausted: requested"
        " cpu=2,requests.nvidia.com/gpu=8; used cpu=0,requests.nvidia.com/gpu=8;"
        " limited to cpu=9,requests.nvidia.com/gpu=8."
    )
    assert world.condition("Scheduled").reason == "QuotaExceeded"


def test_a_quota_that_refuses_some_pods_is_reported_until_all_exist():
    world = gang(2)
    before = dict(world.objects)
    without_pods(world, "train-1-abcde")
    world.warn(JOBS, "train", "FailedCreate", QUOTA)
    world.settle()
    assert world.job.status.message.startswith("1 of 2 pods is created. ResourceQuota team")
    world.objects = before
    world.settle()
    assert world.job.status.reason == "WorkersStarting"


def test_only_the_last_warning_about_quota_counts():
    world = gang(1)
    without_pods(world)
    world.warn(JOBS, "train", "FailedCreate", QUOTA)
    world.warn(JOBS, "train", "FailedCreate", POD_SECURITY)
    world.warn(JOBS, "train", "BackoffLimitExceeded", "too often")
    world.settle()
    assert world.job.status.reason == "PodSecurity"
    assert 'violates PodSecurity "restricted:latest"' in world.job.status.message
    assert "Set podSecurity of the TorchrunQueue to restricted." in world.job.status.message
    assert "x2x4z" not in world.job.status.message


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (QUOTA, "QuotaExceeded", "ResourceQuota team is exhausted"),
        (POD_SECURITY, "PodSecurity", f'{REFUSED} violates PodSecurity "restricted:latest"'),
        (
            'violates PodSecurity "baseline:latest": y',
            "PodSecurity",
            f"{REFUSED} violates PodSecurity",
        ),
        (
            'Error creating: pods "a" is forbidden: error looking up service account ml/x:'
            ' serviceaccount "x" not found',
            "PodsRefused",
            f"{REFUSED} error looking up service account ml/x",
        ),
        (
            'Error creating: admission webhook "w" denied the request: no',
            "PodsRefused",
            f'{REFUSED} admission webhook "w" denied the request: no',
        ),
    ],
)
def test_refusals_are_recognised_by_their_reporter(text, reason, message):
    why = explain_refusal(text)
    assert why.reason == reason
    assert why.message.startswith(message)


def test_a_missing_claim_is_named():
    world = gang(1)
    world.not_placed('0/1 nodes are available: persistentvolumeclaim "data" not found.', 0)
    world.settle()
    assert world.job.status.reason == "ClaimNotFound"
    assert "PVC data does not exist" in world.job.status.message


def test_an_unbound_claim_of_another_owner_is_reported_without_its_name():
    world = gang(1)
    world.not_placed(
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", 0
    )
    world.settle()
    assert world.job.status.reason == "ClaimPending"
    assert "kubectl get pvc" in world.job.status.message


def creating(world: World, *conditions: Condition) -> None:
    waiting = ContainerState(waiting=StateWaiting(reason="ContainerCreating"))
    status = (ContainerStatus(name="trainer", state=waiting),)
    world.pod("train-0-abcde", container_statuses=status, conditions=conditions)


def test_a_mount_failure_is_reported_until_the_sandbox_exists():
    world = gang(1)
    creating(world)
    text = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) other'
    world.warn(PODS, "train-0-abcde", "FailedAttachVolume", text)
    world.settle()
    assert world.job.status.reason == "VolumeNotMounted"
    assert text in world.job.status.message
    assert "Use ReadWriteMany" in world.job.status.message
    creating(world, Condition(type="PodReadyToStartContainers", status="True"))
    world.settle()
    assert world.job.status.reason == "WorkersStarting"


def test_a_read_write_once_claim_of_several_workers_is_warned_of():
    once = {"workspace": {**ZIP["workspace"], "accessMode": "ReadWriteOnce"}}
    world = World(make_job(numNodes=2, volumes=once), make_queue())
    events = [event for _ in range(3) for event in world.step().events]
    assert world.phase == "Syncing"
    condition = world.condition("StorageShared")
    assert (condition.status, condition.reason) == ("False", "ReadWriteOnce")
    assert "train-workspace (ReadWriteOnce)" in condition.message
    assert [event.type for event in events if event.reason == "ReadWriteOnce"] == ["Warning"]
    key = (CLAIMS.plural, "train-workspace")
    claim = world.objects[key]
    world.objects[key] = replace(claim, spec=replace(claim.spec, access_modes=("ReadWriteMany",)))
    world.settle()
    assert all(c.type != "StorageShared" for c in world.job.status.conditions)


def test_a_quota_that_refuses_an_object_has_the_same_message():
    world = World(make_job(numNodes=1, volumes=ZIP), make_queue())
    text = QUOTA.removeprefix("Error creating: ")
    refused = Rejection("pods", "train-sync-0", text)
    plan = reconcile(
        replace(world.observed(), refused=RefusedWrites(rejections=(refused,))), world.now, DEFAULTS
    )
    assert plan.status is not None
    assert plan.status.reason == "QuotaExceeded"
    assert plan.status.message.startswith(
        "The API server refused pods train-sync-0: ResourceQuota team is exhausted"
    )
