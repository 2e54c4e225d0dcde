"""What a report has, when it is sent, and when it is sent again."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ports import refusing_port
from torchrun_runtime.launch import reporting
from torchrun_runtime.launch.cause import Cause
from torchrun_runtime.launch.gang.leader import RestartedRound, Restarts
from torchrun_runtime.launch.reporting import Reporter, ReportPort, describe_restarts, newest_step
from unit.runtime.virtual_time import Clock


@pytest.mark.parametrize(
    ("text", "step"),
    [('{"step": 7}', 7), ('{"step": "8"}', 8), ("{", None), ("[]", None), ("{}", None)],
)
def test_the_newest_step_is_that_of_the_last_report(
    tmp_path: Path, text: str, step: int | None
) -> None:
    assert newest_step(str(tmp_path)) is None
    (tmp_path / "progress").write_text(text)
    assert newest_step(str(tmp_path)) == step


def restarted(number: int, message: str = "ValueError: no") -> RestartedRound:
    cause = Cause(1, number, None, "Exception", message, "2026-01-01T00:00:00.000000Z")
    return RestartedRound(number, number + 10, 1.23456, cause, number * 100 or None)


def test_the_last_three_restarts_are_described() -> None:
    rounds = (*map(restarted, range(4)), restarted(4, "x" * 511 + "\udc80y"))
    body = json.loads(describe_restarts(Restarts(7, rounds)))["restartsInPlace"]
    assert body["count"] == 7
    assert [(last["round"], last["node"]) for last in body["last"]] == [(2, 12), (3, 13), (4, 14)]
    assert [last["message"] for last in body["last"]] == ["ValueError: no"] * 2 + ["x" * 511 + "?"]
    assert body["last"][0] == {
        **restarted(2).cause.body(),
        "round": 2,
        "node": 12,
        "seconds": 1.235,
        "step": 200,
    }
    body = json.loads(describe_restarts(Restarts(1, (restarted(0),))))["restartsInPlace"]
    assert "step" not in body["last"][0], "there was no report"


def test_a_message_is_sent_in_its_own_letters() -> None:
    report = describe_restarts(Restarts(1, (restarted(0, "Größe"),)))
    assert "Größe".encode() in report


def test_without_a_restart_only_a_gang_that_has_fenced_another_one_reports() -> None:
    assert describe_restarts(Restarts()) == b""
    assert json.loads(describe_restarts(Restarts(), is_awaited=True)) == {
        "restartsInPlace": {"count": 0, "last": []}
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of reporters, which have no thread. Connections have more time, by the real one."""
    monkeypatch.setattr(reporting, "time", clock := Clock(1000.0))
    monkeypatch.setattr(reporting, "start_thread", lambda run: None)
    monkeypatch.setattr(reporting, "_TIMEOUT", 60.0)
    return clock


class Link(Reporter):
    """Gets `answers` instead of those of a controller, then 204, and records when it sends what."""

    def __init__(self, clock: Clock, folder: Path, restarts: bytes = b"") -> None:
        super().__init__(ReportPort("http://controller", ""), str(folder), restarts)
        self.answers: list[tuple[int, float, str]] = []
        self.sent: list[tuple[float, bytes]] = []
        self._clock = clock

    def _post(self, values: bytes) -> tuple[int, float, str]:
        self.sent.append((self._clock.now, values))
        return self.answers.pop(0) if self.answers else (204, 0.0, "")


def test_values_are_sent_once(clock: Clock, tmp_path: Path) -> None:
    link = Link(clock, tmp_path)
    assert not link._report()
    for values in (b"1", b"2"):
        (tmp_path / "progress").write_bytes(values)
        assert link._report()
        assert not link._report()
    assert [values for _, values in link.sent] == [b"1", b"2"]


def test_values_that_are_refused_are_sent_again(clock: Clock, tmp_path: Path) -> None:
    link = Link(clock, tmp_path)
    link.answers = [(403, 0.0, "HTTP 403 no"), (0, 0.0, "OSError: no route")]
    (tmp_path / "progress").write_bytes(b"1")
    assert [link._report() for _ in range(4)] == [True, True, True, False]
    assert [values for _, values in link.sent] == [b"1"] * 3


def test_restarts_are_sent_again_each_minute(clock: Clock, tmp_path: Path) -> None:
    link = Link(clock, tmp_path, b"restarts")
    assert link._report()
    assert not link._report()
    clock.now += 59.9
    assert not link._report()
    clock.now += 0.1
    link.answers = [(403, 0.0, "HTTP 403 no")]
    (tmp_path / "progress").write_bytes(b"1")
    assert link._report()
    assert link._report(), "the controller has not accepted the restarts"
    assert not link._report()
    bodies = [body for _, body in link.sent]
    assert bodies == [b"restarts", b"restarts", b"1", b"restarts"]


def test_a_report_is_repeated_for_a_moment(clock: Clock, tmp_path: Path) -> None:
    link = Link(clock, tmp_path)
    link.answers = [(503, 0.0, "HTTP 503"), (429, 0.5, "HTTP 429")]
    assert link._send(b"1")
    assert [round(when - 1000, 3) for when, _ in link.sent] == [0, 0.1, 0.6]


def test_the_time_of_a_report_is_limited(clock: Clock, tmp_path: Path) -> None:
    link = Link(clock, tmp_path)
    link.answers = [(503, 1.0, "HTTP 503"), (503, 0.5, "HTTP 503"), (503, 0.25, "HTTP 503")]
    assert not link._send(b"1")
    assert [when - 1000 for when, _ in link.sent] == [0, 1.0, 1.5]


def test_each_error_is_said_once(
    clock: Clock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = Link(clock, tmp_path)
    link.answers = [(code, 0.0, f"HTTP {code}") for code in (403, 403, 500)]
    for _ in range(4):
        link._send(b"1")
    assert [line.rpartition(": ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "HTTP 403",
        "HTTP 500",
    ]


def test_a_controller_that_does_not_answer_asks_for_no_wait(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        reporter = Reporter(ReportPort(url, str(tmp_path / "token")), str(tmp_path))
        assert reporter._post(b"1")[:2] == (0, 0.0)


@pytest.mark.parametrize(("header", "seconds"), [(b"", 0.0), (b"Retry-After: 7\r\n", 7.0)])
def test_a_controller_may_ask_for_a_wait(
    clock: Clock, tmp_path: Path, header: bytes, seconds: float
) -> None:
    (tmp_path / "token").write_text("token")

    def answer(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection, connection.makefile("rb") as request:
            while request.readline().strip():
                pass
            assert request.read(1) == b"1"
            connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n" + header + b"\r\nno")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        answered = threads.submit(answer, listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        reporter = Reporter(ReportPort(url, str(tmp_path / "token")), str(tmp_path))
        assert reporter._post(b"1") == (503, seconds, "HTTP 503 no")
        answered.result()
