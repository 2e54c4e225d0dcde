"""The reads that a Plan asks for, and what they find."""

from typing import Any

import pytest

from torchrun_api.kinds.resources import Kind
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.controllers import live_reads
from torchrun_controller.reconcile.model.plan import (
    Check,
    GangIsGone,
    JobIsThere,
    NoPodIsUnseen,
    PodIsUnchanged,
)

JOB_IS_THERE = JobIsThere(namespace="ml", name="train", uid="uid-train")
GANG_IS_GONE = GangIsGone(namespace="ml", name="train-r1", owner="uid-train")
POD_IS_UNCHANGED = PodIsUnchanged(namespace="ml", name="train-r1-1", resource_version="7")
NO_POD_IS_UNSEEN = NoPodIsUnseen(namespace="ml", job="train", uids=frozenset({"uid-lost"}))


class Server:
    """Answers with these objects, by kind, and with the UIDs of these pods."""

    def __init__(self, *pods: str, **objects: LiveObject) -> None:
        self.objects = objects
        self.pods = pods
        self.reads: list[tuple[str, str]] = []

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        assert namespace == "ml"
        self.reads.append((kind.kind, name))
        return self.objects.get(kind.kind)

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        assert namespace == "ml"
        self.reads.append(("Pods", job))
        return frozenset(self.pods)


@pytest.mark.parametrize(
    ("server", "check"),
    [
        (Server(TorchrunJob=LiveObject("uid-train", "", is_ending=False)), JOB_IS_THERE),
        (Server(), GANG_IS_GONE),
        (Server(Job=LiveObject("u", "uid-of-another-job", is_ending=False)), GANG_IS_GONE),
        (Server(Job=LiveObject("u", "uid-train", is_ending=True)), GANG_IS_GONE),
        (Server(Pod=LiveObject("uid-pod", "uid-gang", False, "7")), POD_IS_UNCHANGED),
        (Server(), NO_POD_IS_UNSEEN),
        (Server("uid-lost"), NO_POD_IS_UNSEEN),
    ],
    ids=["there", "gone", "foreign", "is being deleted", "unchanged", "no pods", "seen pods"],
)
async def test_a_check_that_holds(server: Server, check: Check) -> None:
    await live_reads.verify(server, (check,))
    assert len(server.reads) == 1


@pytest.mark.parametrize(
    ("server", "check", "message"),
    [
        (Server(), JOB_IS_THERE, "TorchrunJob 'train' is gone"),
        (
            Server(TorchrunJob=LiveObject("another", "", is_ending=False)),
            JOB_IS_THERE,
            "TorchrunJob 'train' is gone",
        ),
        (
            Server(Job=LiveObject("u", "uid-train", is_ending=False)),
            GANG_IS_GONE,
            "Job 'train-r1' exists",
        ),
        (
            Server(Pod=LiveObject("uid-pod", "uid-gang", False, "8")),
            POD_IS_UNCHANGED,
            "pod 'train-r1-1' has changed",
        ),
        (Server(), POD_IS_UNCHANGED, "pod 'train-r1-1' has changed"),
        (Server("uid-lost", "uid-a", "uid-b"), NO_POD_IS_UNSEEN, "does not show 2 pods"),
    ],
    ids=["gone", "replaced", "gang not shown", "changed", "pod is gone", "pods not shown"],
)
async def test_caches_that_are_behind(server: Server, check: Check, message: str) -> None:
    with pytest.raises(SupersededError, match=message):
        await live_reads.verify(server, (check,))


async def test_the_first_check_that_fails_ends_the_reads() -> None:
    server = Server()
    with pytest.raises(SupersededError):
        await live_reads.verify(server, (JOB_IS_THERE, GANG_IS_GONE))
    assert server.reads == [("TorchrunJob", "train")]
