"""The variables that a launcher derives from those of its pod."""

import pytest

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.settings import complete

POD = {
    "TORCHRUN_JOB_UID": "uid",
    "TORCHRUN_ATTEMPT": "2",
    "PET_NNODES": "4",
    "PET_MASTER_ADDR": "train-0.train",
    "PET_MASTER_PORT": "29500",
    "NODE_RANK": "1",
}
DERIVED = {
    "PET_RDZV_BACKEND": "static",
    "PET_RDZV_ENDPOINT": "train-0.train:29500",
    "PET_RDZV_ID": "uid-2",
    "PET_MAX_RESTARTS": "0",
    "PET_NODE_RANK": "1",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "29500",
    "NNODES": "4",
}
ETCD = {"PET_RDZV_BACKEND": "etcd-v2", "PET_RDZV_ENDPOINT": "etcd:2379", "PET_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("more", "derived"),
    [
        ({}, DERIVED),
        (ETCD, {**DERIVED, **ETCD}),
        ({"TORCHRUN_ROLE": "head", "NODE_RANK": "0"}, {**DERIVED, "PET_NODE_RANK": "0"}),
        # Node 0 is the head, in another Job.
        ({"TORCHRUN_ROLE": "worker"}, {**DERIVED, "NODE_RANK": "2", "PET_NODE_RANK": "2"}),
    ],
)
def test_what_follows_from_other_variables_is_derived(
    more: "dict[str, str]", derived: "dict[str, str]"
) -> None:
    assert complete({**POD, **more}) == {**POD, **more, **derived}


def test_a_pod_without_a_gang_gets_nothing() -> None:
    assert complete({"HOME": "/root"}) == {"HOME": "/root"}
    with pytest.raises(LaunchError, match="NODE_RANK is ''"):
        complete({"TORCHRUN_ROLE": "worker"})
