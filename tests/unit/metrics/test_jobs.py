from typing import get_args

import pytest
from msgspec.structs import replace

from metrics_world import World, job, node, queue
from torchrun_api.kinds.admission import Quota
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import TorchrunQueueSpec, TorchrunQueueStatus
from torchrun_api.kinds.status import NetworkUse, Phase
from torchrun_controller.metrics.jobs import MAX_WAITS
from torchrun_controller.metrics.labels import MAX_QUEUES, MAX_REASONS
from torchrun_controller.reconcile.admission.model import Amounts, QueueSummary, RoundRobinState
from torchrun_controller.reconcile.model.conditions import BLOCKED_REASONS

OTHERS = ("", "(others)")


@pytest.fixture
def world() -> World:
    new_world = World()
    new_world.put(queue("gpu"))
    return new_world


def test_jobs_by_phase_with_zeros_for_empty_phases(world: World) -> None:
    world.put(job("a", "Running"), job("b", "Running"), job("c", None))
    assert world.values("torchrun_jobs") == {("Running",): 2, ("Pending",): 1}
    text = world.metrics.snapshot().render("")[0].decode()
    assert text.count("torchrun_jobs{") == len(get_args(Phase))
    world.put(job("a", "Succeeded"))
    world.remove(job("b", "Running"))
    assert world.values("torchrun_jobs") == {("Succeeded",): 1, ("Pending",): 1}


def test_a_standby_exports_no_jobs(world: World) -> None:
    world.put(job("a", "Running", gpus=8))
    world.leads = False
    assert world.values("torchrun_jobs") == {}
    assert world.values("torchrun_queue_gpus") == {}
    world.leads = True
    assert world.values("torchrun_jobs") == {("Running",): 1}


def test_the_longest_wait(world: World) -> None:
    world.put(job("a", "Queued", since=10), job("b", "Queued", since=70), job("c", "Running"))
    assert world.values("torchrun_jobs_oldest_seconds") == {("Queued",): 70}


def test_running_and_waiting_jobs_of_a_queue(world: World) -> None:
    world.put(
        job("a", "Running", gpus=16),
        job("b", "Queued", gpus=8, reason="Unschedulable"),
        job("c", "Pending", gpus=4, reason="Unschedulable"),
        job("d", "Succeeded", gpus=4),
        job("e", "Queued", reason="no word / of ours"),
    )
    assert world.values("torchrun_queue_jobs") == {
        ("team", "gpu", "Running"): 1,
        ("team", "gpu", "Queued"): 2,
        ("team", "gpu", "Pending"): 1,
    }
    assert world.values("torchrun_queue_waiting_jobs") == {
        ("team", "gpu", "Unschedulable"): 2,
        ("team", "gpu", "(others)"): 1,
    }
    assert world.values("torchrun_queue_gpus") == {
        ("team", "gpu", "running"): 16,
        ("team", "gpu", "waiting"): 12,
    }


def test_gpu_seconds_are_those_of_running_jobs(world: World) -> None:
    world.put(job("a", "Running", gpus=8), job("b", "Queued", gpus=8))
    world.time += 10
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 80}
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 80}
    world.time += 5
    world.put(job("a", "Succeeded", gpus=8))
    world.time += 100
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 120}


def test_gpu_seconds_of_a_resized_gang(world: World) -> None:
    world.put(job("a", "Running", gpus=8))
    world.time += 10
    world.put(job("a", "Running", gpus=2))
    world.time += 10
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 100}


def test_gpu_seconds_of_another_leader_are_not_counted_again(world: World) -> None:
    world.leads = False
    world.put(job("a", "Running", gpus=8, since=500))
    world.time += 1000
    assert world.values("torchrun_queue_gpu_seconds_total") == {}
    world.leads = True
    assert world.values("torchrun_queue_gpu_seconds_total") == {}
    world.time += 2
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 16}


def test_unfenced_workers_of_unfinished_jobs(world: World) -> None:
    world.put(job("a", "Queued", unfenced=2), job("b", "Running", unfenced=1))
    world.put(job("c", "Failed", unfenced=7))
    assert world.values("torchrun_unfenced_workers") == {(): 3}


def test_the_networks_of_running_jobs(world: World) -> None:
    slow = (Condition(type="SlowNetwork", status="True", reason="NetworksDiffer"),)
    ib, socket = NetworkUse(transport="IBext_v8", nodes=7), NetworkUse(transport="Socket", nodes=1)
    own, efa = NetworkUse(transport="own", nodes=4), NetworkUse(transport="Libfabric", nodes=2)
    for name, phase, networks, conditions in (
        ("a", "Running", (ib, socket), slow),
        ("b", "Running", (own, efa), ()),
        ("c", "Failed", (ib, socket), slow),
    ):
        each = job(name, phase)  # type: ignore[arg-type]
        status = replace(each.status, network=networks, conditions=conditions)
        world.put(replace(each, status=status))
    nodes = {("IB",): 7, ("Socket",): 1, ("Libfabric",): 2, ("(others)",): 4}
    assert world.values("torchrun_network_nodes") == nodes
    assert world.values("torchrun_slow_network_jobs") == {(): 1}


def test_gpus_of_schedulable_nodes(world: World) -> None:
    assert world.values("torchrun_node_gpus") == {}
    world.nodes = [
        node("a", "8"),
        node("b", "8", cordoned=True),
        node("c", "8", ready=False),
        node("d", "no number"),
        node("e", "4"),
    ]
    assert world.values("torchrun_node_gpus") == {(): 12}


def test_a_queue_that_is_not_ready_has_a_reason(world: World) -> None:
    bad = Condition(type="Ready", status="False", reason="TemplateInvalid")
    good = Condition(type="Ready", status="True", reason="Ready")
    world.put(replace(queue("bad"), status=TorchrunQueueStatus(conditions=(bad,))))
    world.put(replace(queue("good"), status=TorchrunQueueStatus(conditions=(good,))))
    text = world.metrics.snapshot().render("")[0].decode()
    shown = [line for line in text.splitlines() if line.startswith("torchrun_queue_ready{")]
    assert shown == [
        'torchrun_queue_ready{job_namespace="team",queue="bad",reason="TemplateInvalid"} 0.0',
        'torchrun_queue_ready{job_namespace="team",queue="good",reason="Ready"} 1.0',
    ]


def test_quota_and_what_is_admitted(world: World) -> None:
    world.put(replace(queue("gpu"), spec=TorchrunQueueSpec(quota=Quota(gpus=32))))
    used = QueueSummary(
        namespace="team", name="gpu", round_robin=RoundRobinState(weight=1), used=Amounts(gpus=24)
    )
    gone = QueueSummary(
        namespace="team", name="gone", round_robin=RoundRobinState(weight=1), used=Amounts(gpus=1)
    )
    world.census.set_admission((used, gone))
    assert world.values("torchrun_queue_gpus") == {
        ("team", "gpu", "quota"): 32,
        ("team", "gpu", "admitted"): 24,
    }


def test_queues_beyond_the_limit_share_one_series(world: World) -> None:
    world.put(*(queue(f"q{number}") for number in range(MAX_QUEUES + 5)))
    world.put(job("a", "Running", queue=f"q{MAX_QUEUES + 2}"))
    world.put(job("b", "Running", queue=f"q{MAX_QUEUES + 3}", gpus=1))
    world.put(job("c", "Pending", queue="no-such-queue"))
    expected = {(*OTHERS, "Running"): 2, (*OTHERS, "Pending"): 1}
    assert world.values("torchrun_queue_jobs") == expected
    world.time += 3
    assert world.values("torchrun_queue_gpu_seconds_total") == {OTHERS: 3}


def test_a_freed_series_goes_to_the_next_queue(world: World) -> None:
    world.put(*(queue(f"q{number}") for number in range(MAX_QUEUES + 2)))
    late = f"q{MAX_QUEUES - 1}"  # the fixture's queue has the first place
    world.put(job("a", "Running", queue=late, gpus=1), job("b", "Running", gpus=1))
    world.time += 10
    spent = {OTHERS: 10, ("team", "gpu"): 10}
    assert world.values("torchrun_queue_gpu_seconds_total") == spent
    world.remove(queue("gpu"))
    assert world.values("torchrun_queue_jobs") == {
        ("team", late, "Running"): 1,
        (*OTHERS, "Running"): 1,
    }
    assert world.values("torchrun_queue_gpu_seconds_total") == {OTHERS: 10}
    world.put(queue("gpu"))
    world.time += 1
    spent = {OTHERS: 11, ("team", late): 1}
    assert world.values("torchrun_queue_gpu_seconds_total") == spent


def test_the_next_queue_starts_its_counters_at_zero(world: World) -> None:
    world.put(*(queue(f"q{number}") for number in range(MAX_QUEUES + 2)))
    world.remove(queue("gpu"))
    value = world.metrics.registry.get_sample_value
    labels = {"job_namespace": "team", "queue": f"q{MAX_QUEUES - 1}"}
    assert value("torchrun_queue_restarts_total", {**labels, "kind": "failure"}) == 0
    assert value("torchrun_queue_jobs_finished_total", {**labels, "phase": "Failed"}) == 0


def test_names_that_are_cut_to_the_same_text_share_a_series(world: World) -> None:
    long = "q" * 100
    world.put(queue(long + "a"), queue(long + "b"))
    world.put(job("a", "Running", queue=long + "a"), job("b", "Running", queue=long + "b"))
    shown = {("team", long[:63], "Running"): 1, (*OTHERS, "Running"): 1}
    assert world.values("torchrun_queue_jobs") == shown


def test_reasons_are_bounded(world: World) -> None:
    world.put(*(queue(f"q{number}") for number in range(20)))
    for number in range(5000):
        world.put(job(f"j{number}", "Queued", queue=f"q{number % 20}", reason=f"R{number % 997}"))
    waits = world.values("torchrun_queue_waiting_jobs")
    assert sum(waits.values()) == 5000
    assert len(waits) <= MAX_WAITS + MAX_QUEUES + 1
    assert len({reason for _, _, reason in waits}) <= MAX_REASONS + 1


def test_reasons_of_alerts_are_never_among_the_others(world: World) -> None:
    paused = Condition(type="Ready", status="False", reason="Paused")
    world.put(*(queue(f"q{number}") for number in range(20)))
    for number in range(5000):
        world.put(job(f"j{number}", "Queued", queue=f"q{number % 20}", reason=f"R{number % 997}"))
    world.values("torchrun_queue_waiting_jobs")
    world.put(replace(queue("paused"), status=TorchrunQueueStatus(conditions=(paused,))))
    for reason in BLOCKED_REASONS:
        world.put(job(reason.lower(), "Pending", reason=reason))
    waits = world.values("torchrun_queue_waiting_jobs")
    assert {reason for _, queue, reason in waits if queue == "gpu"} == BLOCKED_REASONS
    text = world.metrics.snapshot().render("")[0].decode()
    assert 'queue="paused",reason="Paused"} 0.0' in text


@pytest.mark.parametrize("step", [-3600, 3600])
def test_gpu_seconds_do_not_change_if_the_clock_is_set(world: World, step: float) -> None:
    world.put(job("a", "Running", gpus=8))
    world.clock_step = step
    assert world.values("torchrun_queue_gpu_seconds_total") == {}
    world.time += 10
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 80}
    world.clock_step = 0
    world.put(job("a", "Succeeded", gpus=8))
    assert world.values("torchrun_queue_gpu_seconds_total") == {("team", "gpu"): 80}
