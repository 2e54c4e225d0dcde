"""Fields without an effect are named in a condition."""

import pytest

from torchrun_api.kinds.job import Elastic, TorchrunJobSpec
from torchrun_api.kinds.queue import TorchrunQueueSpec
from torchrun_api.kinds.shared import Distributed
from torchrun_api.kinds.unsupported import not_yet_supported


def test_a_supported_spec_has_no_message() -> None:
    assert not_yet_supported(TorchrunJobSpec(), TorchrunQueueSpec()) == ()
    both = TorchrunQueueSpec(kai_queue="gpu-training", parent_kai_queue="default")
    assert not_yet_supported(TorchrunJobSpec(), both) == ()


def test_each_field_is_named_once() -> None:
    job = TorchrunJobSpec(num_nodes=2)
    queue = TorchrunQueueSpec(parent_kai_queue="default")
    named = [entry.split(" of the queue")[0] for entry in not_yet_supported(job, queue)]
    assert named == ["spec.parentKaiQueue"]


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_needs_an_endpoint_of_job_or_queue(backend: str) -> None:
    settings = Distributed(rdzv_backend=backend)
    named = Distributed(rdzv_endpoint="etcd.infra:2379")
    both = Distributed(rdzv_backend=backend, rdzv_endpoint="etcd.infra:2379")
    none, queue = TorchrunJobSpec(), TorchrunQueueSpec(distributed=settings)
    for job in (none, TorchrunJobSpec(distributed=settings)):
        (message,) = not_yet_supported(job, queue)
        assert message.startswith(f"distributed.rdzvBackend is {backend}, ")
        assert "static is used" in message
    elastic = TorchrunJobSpec(elastic=Elastic(min_nodes=1, max_nodes=2))
    assert "c10d is used" in not_yet_supported(elastic, queue)[0]
    assert not_yet_supported(TorchrunJobSpec(distributed=named), queue) == ()
    assert not_yet_supported(none, TorchrunQueueSpec(distributed=both)) == ()
    other = TorchrunJobSpec(distributed=Distributed(rdzv_backend="c10d"))
    assert not_yet_supported(other, queue) == ()
