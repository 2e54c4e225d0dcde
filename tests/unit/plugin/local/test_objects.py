"""The objects of a run on this machine, decided by the real reconcile."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from kubectl_torchrun.local.job import job_and_queue
from kubectl_torchrun.local.objects import LocalObjects, Stop
from kubectl_torchrun.upload.job_manifest import Request
from torchrun_api import names
from torchrun_api.json import JsonObject
from torchrun_api.kinds.core import Pod
from torchrun_controller.reconcile import Defaults, reconcile

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Machine:
    """Carries Plans out as the run does, with pods that only the test ends."""

    def __init__(self, **spec: object) -> None:
        body: JsonObject = {"jobQueue": "q", "command": "python train.py", "numNodes": 2, **spec}  # type: ignore[dict-item]
        manifest: JsonObject = {"metadata": {"name": "t"}, "spec": body}
        job, queue, _ = job_and_queue(Request("t", "", "", manifest=manifest), None, START)
        self.objects = LocalObjects(job, queue)
        self.now = START
        self.started: list[Pod] = []
        self.stops: list[Stop] = []
        self.settle()

    @property
    def phase(self) -> str:
        return self.objects.job.status.phase or ""

    @property
    def reason(self) -> str:
        return self.objects.job.status.reason

    def settle(self) -> float | None:
        for _ in range(20):
            plan = reconcile(self.objects.observed(), self.now, Defaults(runtime_image="local"))
            for apply in plan.applies:
                for pod in self.objects.apply(apply, self.now):
                    self.started.append(pod)
                    self.objects.starts(pod.metadata.uid, self.now)
            for delete in plan.deletes:
                self.stops += self.objects.delete(delete, self.now)
            if plan.status is not None:
                self.objects.write_status(plan.status)
            if not (plan.applies or plan.deletes or plan.status):
                return plan.requeue_after
        raise AssertionError("no rest after 20 reconciles")

    def end(self, pod: Pod, code: int = 0, message: str = "") -> None:
        self.stops += self.objects.ends(pod.metadata.uid, code, message, self.now)
        self.settle()

    def end_stopped(self) -> None:
        for stop in self.stops:
            self.objects.ends(stop.pod.metadata.uid, 143, "", self.now)
        self.stops.clear()
        self.settle()


def test_a_run_succeeds_when_both_nodes_have() -> None:
    machine = Machine()
    first, second = machine.started
    assert machine.phase == "Running"
    machine.end(first)
    assert machine.phase == "Running"
    machine.end(second)
    assert (machine.phase, machine.reason) == ("Succeeded", "Completed")


def test_both_nodes_may_start_their_ranks() -> None:
    machine = Machine()
    first, _ = machine.started
    annotations = machine.objects.annotations[first.metadata.uid]
    assert annotations[names.START] == "0"


def test_a_failed_node_ends_the_other_one_and_a_new_gang_follows_the_back_off() -> None:
    machine = Machine(reliability={"maxRestarts": 1})
    first, second = machine.started
    machine.end(second, 1, '{"reason": "Exception", "message": "ValueError: bad batch"}')
    assert [stop.pod.metadata.uid for stop in machine.stops] == [first.metadata.uid]
    machine.end_stopped()
    machine.now += timedelta(hours=1)
    machine.settle()
    failure = machine.objects.job.status.last_failure
    assert failure is not None
    assert failure.message == "Pod t-1: ValueError: bad batch"
    assert [pod.metadata.name for pod in machine.started] == ["t-0", "t-1", "t-r1-0", "t-r1-1"]
    machine.end(machine.started[2], 1)
    machine.end_stopped()
    assert (machine.phase, machine.objects.job.status.restarts) == ("Failed", 1)


def test_a_suspended_run_asks_its_nodes_to_end_with_their_grace_period() -> None:
    from msgspec.structs import replace

    machine = Machine(reliability={"terminationGracePeriodSeconds": 60})
    job = machine.objects.job
    machine.objects.job = replace(job, spec=replace(job.spec, suspend=True))
    machine.settle()
    assert len(machine.stops) == 2
    machine.end_stopped()
    assert machine.phase == "Suspended"


@pytest.mark.parametrize(("code", "signal"), [(-9, 9), (137, 0)])
def test_a_signal_is_recorded(code: int, signal: int) -> None:
    machine = Machine(reliability={"restartPolicy": "Never"})
    machine.end(machine.started[0], code)
    pod = machine.objects.observed().gang.workers[0]
    ended = pod.status.container_statuses[0].state.terminated
    assert ended is not None
    assert (ended.exit_code, ended.signal) == (137, signal)


def test_the_cause_shows_although_its_node_is_ended_with_the_others() -> None:
    machine = Machine()
    first, second = machine.started
    at = {"rank": None, "signal": None, "time": "2026-01-02T03:04:05.5Z"}
    lost = {**at, "exitCode": 143, "reason": "PeerFailed", "message": "the gang ended"}
    machine.end(second, 143, json.dumps(lost))
    assert machine.phase == "Running"
    cause = {**at, "exitCode": 127, "reason": "CommandNotFound", "message": "no file train.py"}
    machine.end(first, 127, json.dumps(cause))
    assert (machine.phase, machine.reason) == ("Failed", "CommandNotFound")
