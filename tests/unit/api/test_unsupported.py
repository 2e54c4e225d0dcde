"""A field that is not honoured is named."""

from torchrun_api.job import TorchrunJobSpec
from torchrun_api.queue import TorchrunQueueSpec
from torchrun_api.unsupported import not_yet_supported


def test_nothing_to_say() -> None:
    assert not_yet_supported(TorchrunJobSpec(), TorchrunQueueSpec()) == ()
    both = TorchrunQueueSpec(kai_queue="gpu-training", parent_kai_queue="default")
    assert not_yet_supported(TorchrunJobSpec(), both) == ()


def test_each_field_is_named_once() -> None:
    job = TorchrunJobSpec(num_nodes=2)
    queue = TorchrunQueueSpec(parent_kai_queue="default")
    named = [entry.split(":")[0] for entry in not_yet_supported(job, queue)]
    assert named == ["queue spec.parentKaiQueue"]
