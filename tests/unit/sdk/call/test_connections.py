"""What a client does with the messages of pods, and with its connections into them."""

import queue
import threading
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_sdk.call import connections
from torchrun_sdk.call.connections import CallDelivery, Connections, MonitorEvent, _Pod
from torchrun_sdk.cluster.kubectl import Child, Kubectl
from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import Call, Here, Lines, Reference, Wants, encode

from .test_gang import until

LINE = encode(Lines(0, 0, ["x" * 100]))


@pytest.fixture
def events() -> "queue.Queue[MonitorEvent]":
    return queue.Queue()


def pod() -> _Pod:
    return _Pod("p", 0, "0")


def test_a_pod_waits_while_its_output_is_not_handled(
    events: "queue.Queue[MonitorEvent]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LONGEST_BACKLOG", 10 * len(LINE))
    subject = Connections(Kubectl(), "j", "c", events)
    reader = threading.Thread(target=lambda: [subject._line(LINE, pod()) for _ in range(50)])
    reader.start()
    until(lambda: events.qsize() > 1)
    reader.join(0.5)
    assert reader.is_alive()
    assert events.qsize() < 20
    for _ in range(50):
        assert events.get(timeout=60)[0] == "lines"
    reader.join()


def test_a_pod_that_waits_does_not_delay_the_end(
    events: "queue.Queue[MonitorEvent]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LONGEST_BACKLOG", 0)
    subject = Connections(Kubectl(), "j", "c", events)
    reader = threading.Thread(target=lambda: [subject._line(LINE, pod()) for _ in range(50)])
    reader.start()
    until(events.qsize)
    subject.close()
    reader.join(60)
    assert not reader.is_alive()


def test_a_line_beyond_the_limit_ends_the_call(
    events: "queue.Queue[MonitorEvent]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LONGEST_LINE", 100)
    Connections(Kubectl(), "j", "c", events)._line(LINE[:100], pod())
    assert events.get(timeout=0) == ("unreadable", ("p", "it has more than 100 characters"))


def test_a_file_that_is_deleted_before_it_is_sent(
    events: "queue.Queue[MonitorEvent]", tmp_path: Path
) -> None:
    call = Call("c", Reference("f", script="s.py"), pack([[], {}], "json", "x"))
    delivery = CallDelivery(call, tmp_path, Kubectl())
    delivery._files.set_result(f"{'0' * 64} 1 644 gone.py")
    Connections(Kubectl(), "j", "c", events, delivery)._line(encode(Wants([0])), pod())
    what, error = events.get(timeout=0)
    assert what == "failed"
    assert isinstance(error, kt.ClusterError)
    assert "gone.py" in str(error)


@pytest.mark.long
def test_a_connection_that_is_closed_while_it_starts_leaves_no_program(
    events: "queue.Queue[MonitorEvent]",
    tmp_path: Path,
    cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Child] = []

    class ClosedWhileItStarts(Child):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            started.append(self)
            subject.close()

    kubectl = Kubectl()
    kubectl.command()  # selects the namespace with the kubectl of the test
    (tmp_path / "bin" / "kubectl").write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(connections, "Child", ClosedWhileItStarts)
    subject = Connections(kubectl, "j", "c", events)
    subject._collect(pod())
    assert started[0]._process.poll() is not None


@pytest.mark.long
def test_a_client_of_the_newest_call_stays_with_it(
    events: "queue.Queue[MonitorEvent]",
    tmp_path: Path,
    cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pod may have a newer one when the connection is made again."""
    kubectl = Kubectl()
    kubectl.command()  # selects the namespace with the kubectl of the test
    requested = tmp_path / "requested"
    (tmp_path / "bin" / "kubectl").write_text(
        f'#!/bin/sh\nfor call; do :; done\necho "call=$call" >>{requested}\n'
        f"echo '{encode(Here(True, 'free', 1, 'a'))}'\n"
    )
    monkeypatch.setattr(connections, "_AGAIN", 0.0)
    subject = Connections(kubectl, "j", "", events)
    reader = threading.Thread(target=subject._collect, args=(pod(),))
    reader.start()
    until(lambda: requested.exists() and len(requested.read_text().splitlines()) > 2)
    subject.close()
    reader.join(60)
    assert requested.read_text().splitlines()[:3] == ["call=", "call=a", "call=a"]
