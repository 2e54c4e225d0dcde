"""How a sync or setup pod ended, read from its message, its container or its pod."""

from datetime import timedelta

import pytest

from torchrun_api.kinds.core import (
    ContainerState,
    ContainerStatus,
    Pod,
    PodStatus,
    StateRunning,
    StateTerminated,
)
from torchrun_api.kinds.meta import ChildMeta, Condition
from torchrun_controller.reconcile.workspace.helper_pods import (
    SyncMessage,
    container_end,
    retry_delay,
    retry_seconds_left,
)
from world import START


def pod(message: str = "", reason: str = "Error", **status: object) -> Pod:
    ended = StateTerminated(exit_code=1, reason=reason, message=message, finished_at=START)
    container = ContainerStatus(name="sync", state=ContainerState(terminated=ended))
    fields = {"phase": "Failed", "container_statuses": (container,), **status}
    return Pod(
        metadata=ChildMeta(name="a-sync-1", creation_timestamp=START),
        status=PodStatus(**fields),  # type: ignore[arg-type]
    )


def test_the_termination_message_counts():
    said = container_end(pod('{"reason": "SourceNotFound", "permanent": true}'), "sync").message
    assert said == SyncMessage(reason="SourceNotFound", permanent=True)


@pytest.mark.parametrize(("reason", "expected"), [("Error", ""), ("OOMKilled", "OOMKilled")])
def test_without_a_message_the_last_line_counts(reason, expected):
    message = container_end(pod("Traceback:\nOSError: no\n", reason), "sync").message
    assert message == SyncMessage(reason=expected, message="OSError: no")


@pytest.mark.parametrize(("reason", "expected"), [("Error", ""), ("OOMKilled", "OOMKilled")])
def test_a_log_of_one_json_object_is_no_message_of_the_program(reason, expected):
    """The kubelet takes the log (FallbackToLogsOnError) of a program that was killed."""
    line = '{"time": "2026-11-26T14:54:14.799Z", "level": "info", "event": "fetching"}'
    message = container_end(pod(line + "\n", reason), "sync").message
    assert message == SyncMessage(reason=expected, message=line)


def test_a_result_stays_if_its_container_is_killed_after_it():
    message = container_end(pod('{"commit": "abc", "files": 1}', "OOMKilled"), "sync").message
    assert (message.reason, message.commit) == ("OOMKilled", "abc")


def test_an_evicted_pod_reports_the_disruption():
    words = '{"reason": "Stopped", "permanent": true}'
    assert container_end(pod(words), "sync").message.permanent
    drained = Condition(type="DisruptionTarget", status="True", reason="Drain", message="gone")
    assert container_end(pod(words, conditions=(drained,)), "sync").message == SyncMessage(
        reason="Drain", message="gone"
    )
    lost = PodStatus(phase="Failed", reason="NodeLost", message="the node is gone")
    message = container_end(Pod(metadata=ChildMeta(name="a-sync-1"), status=lost), "sync").message
    assert message == SyncMessage(reason="NodeLost", message="the node is gone")


def test_a_restarted_container_has_no_message():
    running = ContainerStatus(name="sync", state=ContainerState(running=StateRunning()))
    assert container_end(pod(container_statuses=(running,)), "sync").message == SyncMessage()


def numbered(number: int, phase: str) -> Pod:
    metadata = ChildMeta(name=f"a-sync-{number}", creation_timestamp=START)
    return Pod(metadata=metadata, status=PodStatus(phase=phase))


def test_a_pod_that_serves_its_result_ends_the_count():
    ended = ContainerState(terminated=StateTerminated(exit_code=0))
    received = ContainerStatus(name="sync", state=ended)
    status = PodStatus(phase="Running", container_statuses=(received,))
    serving = Pod(metadata=ChildMeta(name="a-sync-5", creation_timestamp=START), status=status)
    assert retry_delay((serving, numbered(6, "Failed"))) == timedelta(seconds=10)
    starting = numbered(5, "Running")
    assert retry_delay((starting, numbered(6, "Failed"))) == timedelta(minutes=5)


@pytest.mark.parametrize(
    ("phases", "seconds"),
    [
        ({0: "Failed"}, 10),
        ({0: "Failed", 1: "Failed"}, 20),
        ({7: "Failed", 8: "Failed", 9: "Failed"}, 300),
        ({5: "Succeeded", 6: "Failed"}, 10),
        ({4: "Succeeded", 5: "Succeeded", 7: "Failed", 8: "Failed"}, 40),
        ({5: "Succeeded", 30: "Failed"}, 300),
    ],
)
def test_the_delay_doubles_from_the_last_success_on(phases, seconds):
    pods = [numbered(number, phase) for number, phase in phases.items()]
    assert retry_delay(pods) == timedelta(seconds=seconds)
    end = container_end(pods[-1], "sync")
    now = START + timedelta(seconds=4)
    assert retry_seconds_left(pods, end, now) == seconds - 4
