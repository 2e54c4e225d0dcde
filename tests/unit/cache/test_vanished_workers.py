"""Workers whose pods are removed before the kubelet has reported their end."""

from datetime import UTC, datetime, timedelta

import pytest

from torchrun_api import names
from torchrun_api.kinds.core import Pod, PodSpec, PodStatus
from torchrun_api.kinds.meta import ChildLabels, ChildMeta
from torchrun_controller.cache.store import Change
from torchrun_controller.cache.vanished_workers import KEPT, VanishedWorkers

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pod(phase: str = "Running", node: str = "node-1", component: str = names.WORKER) -> Pod:
    labels = ChildLabels(torchrun_job="train", component=component)
    meta = ChildMeta(namespace="ml", name="train-0-abcde", labels=labels)
    return Pod(metadata=meta, spec=PodSpec(node_name=node), status=PodStatus(phase=phase))


@pytest.mark.parametrize(
    ("change", "is_noted"),
    [
        (Change(pod(), None), True),
        (Change(pod("Pending"), None), True),
        (Change(pod("Failed"), None), False),
        (Change(pod("Succeeded"), None), False),
        (Change(pod(node=""), None), False),
        (Change(pod(component=names.SYNC), None), False),
        (Change(pod(), pod("Failed")), False),
        (Change(None, pod()), False),
    ],
)
def test_a_worker_is_noted_if_it_may_still_run(change: Change[Pod], is_noted: bool) -> None:
    workers = VanishedWorkers(lambda: NOW)
    workers.note(change, False)
    assert [each.pod for each in workers.of("ml", "train")] == ([change.old] if is_noted else [])
    assert workers.of("ml", "other") == ()


def test_it_is_forgotten_after_a_while() -> None:
    times = [NOW]
    workers = VanishedWorkers(lambda: times[-1])
    workers.note(Change(pod(), None), False)
    times.append(NOW + KEPT - timedelta(seconds=1))
    assert len(workers.of("ml", "train")) == 1
    times.append(NOW + KEPT)
    assert workers.of("ml", "train") == ()
