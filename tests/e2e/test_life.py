"""The lifecycle of a job with real pods: restart, suspension, resize, deadline and end."""

from collections.abc import Callable

import pytest

from e2e.history import assert_gangs_never_overlap
from e2e.manifests import job, zip_job
from e2e.ranks import ROUNDS, kill_rank, pod_of
from e2e.space import Space, until
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS

# Attempt 0 runs until it is stopped. Later attempts succeed at once.
FIRST_ATTEMPT_HANGS = [
    "python3",
    "-c",
    "import os, time; time.sleep(0 if int(os.environ['TORCHRUN_ATTEMPT']) else 600)",
]
HANGS = ["python3", "-c", "import time; time.sleep(600)"]


def running(space: Space, name: str, command: object, nodes: int = 2, **spec: object) -> None:
    space.apply(job(name, "plain", command, nodes, **spec))
    space.wait_phase(name, "Running")


def delete_pod(space: Space, pod: str) -> None:
    space.kubectl("delete", "pod", pod, "--wait=false")


def evict(space: Space, pod: str) -> None:
    """Evict a pod, as `kubectl drain` does."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": space.name},
    }
    space.api.post(f"{PODS.path(space.name, pod)}/eviction", json=body).raise_for_status()


@pytest.mark.parametrize(
    ("harm", "restarts", "disruptions", "reason"),
    [
        (kill_rank, 1, 0, "Signaled"),
        pytest.param(delete_pod, 0, 1, "PodDeleted", marks=pytest.mark.long),
        (evict, 0, 1, "EvictionByEvictionAPI"),
    ],
    ids=["killed", "deleted", "evicted"],
)
def test_a_lost_rank_restarts_the_gang_and_the_job_succeeds(
    space: Space,
    harm: Callable[[Space, str], None],
    restarts: int,
    disruptions: int,
    reason: str,
):
    with space.history(PODS) as pods, space.history(JOBS) as jobs:
        running(space, "train", FIRST_ATTEMPT_HANGS, reliability={"restartScope": "Gang"})
        harm(space, pod_of(space, "train", 1))
        status = space.wait_phase("train", "Succeeded")
        assert_gangs_never_overlap(pods)
        assert {name: len(uids) for name, uids in jobs.uids().items()} == {
            "train": 1,
            "train-r1": 1,
        }
    assert status["attempt"] == 1
    left = [
        "jobs/train",
        "jobs/train-r1",
        # The deleted worker is gone; the one that failed by itself stays.
        *(["pods/train-1-* Failed"] if harm is kill_rank else []),
        "pods/train-r1-0-* Succeeded",
        "pods/train-r1-1-* Succeeded",
        "services/train",
        "torchrunjobs/train Succeeded",
    ]
    # The Job controller removes the finalizer of a deleted pod a moment later.
    until(lambda: space.end_state() == left, f"only {left}")
    assert (status.get("restarts", 0), status.get("disruptions", 0)) == (restarts, disruptions)
    assert status["attempts"][0]["reason"] == reason
    assert status["lastFailure"]["reason"] == reason


def test_a_killed_rank_restarts_the_ranks_in_the_same_pods(space: Space):
    with space.history(PODS) as pods, space.history(JOBS) as jobs:
        running(space, "train", ROUNDS)
        workers = [pod_of(space, "train", index) for index in range(2)]
        state = ("-c", "trainer", "--", "cat", "/dev/shm/state")
        for worker in workers:
            until(
                lambda w=worker: "state" in space.kubectl("exec", w, *state, check=False), "round 0"
            )
        kill_rank(space, workers[1])
        status = space.wait_phase("train", "Succeeded")
        assert [len(uids) for uids in jobs.uids().values()] == [1]
        assert sorted(pods.uids()) == sorted(workers)
    assert (status.get("attempt", 0), status["restarts"], status["restartsInPlace"]) == (0, 1, 1)
    (end,) = status["attempts"]
    assert (end["round"], end["reason"], end["counted"]) == (0, "Signaled", True)
    assert status["lastFailure"]["signal"] == 9
    for index, worker in enumerate(workers):
        log = space.kubectl("logs", worker, "-c", "trainer")
        words = [line for line in log.splitlines() if "torchrun-launch" not in line]
        assert words == ["round 0", "round 1", f"state of node {index}"]
    words = ("get", "events", "--field-selector", "reason=RestartedInPlace")
    until(lambda: "Round 0 of attempt 0 failed" in space.kubectl(*words), "the event")


def test_out_of_memory_is_reported_and_counted(space: Space):
    eats = ["python3", "-c", "b = bytearray(10**9); import time; time.sleep(60)"]
    space.apply(job("eats", "plain", eats, 1, reliability={"maxRestarts": 1}))
    status = space.wait_phase("eats", "Failed")
    assert (status["restarts"], status["reason"]) == (1, "OOMKilled")
    assert "All restarts are used (maxRestarts is 1)." in status["message"]
    words = ("get", "events", "--field-selector", "involvedObject.name=eats")
    # Events are independent of the status and may be later.
    until(lambda: "OOMKilled" in space.kubectl(*words), "the event")


def test_a_suspension_deletes_the_pods_and_a_resume_continues(space: Space):
    with space.history(PODS) as pods:
        running(space, "train", FIRST_ATTEMPT_HANGS)
        space.kubectl("patch", "tj", "train", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        status = space.wait_phase("train", "Suspended")
        space.kubectl("wait", "pods,jobs", "--all", "--for=delete", "--timeout=180s")
        assert status["runningSeconds"] >= 0
        space.kubectl("patch", "tj", "train", "--type=merge", "-p", '{"spec":{"suspend":false}}')
        status = space.wait_phase("train", "Succeeded")
        assert_gangs_never_overlap(pods)
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0)


def test_an_elastic_job_is_scaled_by_kubectl(space: Space):
    with space.history(PODS) as pods:
        running(space, "train", HANGS, 1, elastic={"minNodes": 1, "maxNodes": 3})
        for size in (2, 1):
            space.kubectl("scale", "torchrunjob/train", f"--replicas={size}")
            space.wait(
                "torchrunjob/train", f"jsonpath={{.status.workersStatus}}={size}/{size} ready"
            )
        refused = space.kubectl("scale", "torchrunjob/train", "--replicas=4", check=False)
        assert "numNodes must be between" in refused
        assert_gangs_never_overlap(pods)
    status = space.get(TORCHRUN_JOBS, "train")["status"]
    assert (status["attempt"], status.get("restarts", 0), status["numNodes"]) == (2, 0, 1)


def test_a_deadline_and_a_ttl(space: Space):
    limits = {"activeDeadlineSeconds": 3, "ttlSecondsAfterFinished": 2}
    with space.history(TORCHRUN_JOBS) as jobs:
        space.apply(job("short", "plain", HANGS, 1, reliability=limits))
        space.kubectl("wait", "torchrunjob/short", "--for=delete", "--timeout=180s")
        jobs.until(lambda state: jobs.is_last(state), name="short")
        assert jobs.phases("short", "TimedOut")[-1] == "TimedOut"
    space.kubectl("wait", "pods", "--all", "--for=delete", "--timeout=180s")


@pytest.mark.parametrize(
    "phase", ["Pending", "Syncing", "Queued", "Running", "Suspended", "Succeeded", "Failed"]
)
def test_a_job_can_be_deleted_in_any_phase(space: Space, phase: str):
    spec: dict[str, object] = {"suspend": True} if phase == "Suspended" else {}
    queue = "none" if phase == "Pending" else "plain"
    if phase == "Queued":
        spec["scheduling"] = {"nodeSelector": {"no-such": "node"}}
    if phase == "Failed":
        spec["reliability"] = {"maxRestarts": 0}
    command = {"Succeeded": ["true"], "Failed": ["false"]}.get(phase, HANGS)
    make = zip_job if phase == "Syncing" else job
    space.apply(make("gone", queue, command, 2, **spec))
    space.wait_phase("gone", phase)
    space.kubectl("delete", "torchrunjob", "gone", "--timeout=180s")
    kinds = "pods,jobs,services,persistentvolumeclaims"
    space.kubectl("wait", kinds, "--all", "--for=delete", "--timeout=180s")
    assert space.end_state() == []
