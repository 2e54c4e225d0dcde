"""The control port of Ray pods: workers of the call, and other clients."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from torchrun_sdk.errors import QuorumTimeout
from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import Call, Reference
from torchrun_sdk.worker import control_port, ray

from ..pods import SECONDS

SECRET = "of-this-call"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    free = free_port()
    monkeypatch.setattr(ray, "_CONTROL", free)
    return free


@pytest.fixture
def workers(port: int) -> Iterator[ray._Workers]:
    with ray._Workers(SECRET) as workers:
        yield workers


def stranger(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def test_other_clients_are_no_workers(port: int, workers: ray._Workers) -> None:
    requests = [
        b"",
        b"done\n",
        b"\n",
        b"x" * 1000,
        b"wrong\n",
        control_port.digest(SECRET).encode() + b"\n",
    ]
    strangers = [stranger(port, each) for each in requests]
    with pytest.raises(QuorumTimeout, match="0 of 1 workers"):
        workers.wait(1, 0.5)
    with ray._connect("127.0.0.1", SECRET, SECONDS) as worker:
        workers.wait(1, SECONDS)
        workers.dismiss()
        assert worker.recv(100) == control_port.DONE
    assert all(is_closed(each) for each in strangers[1:])
    for each in strangers:
        each.close()


def test_silent_connections_do_not_block_workers(
    port: int, workers: ray._Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_port, "_SHOW_SECONDS", 10 * SECONDS)
    strangers = [stranger(port) for _ in range(2 * control_port._MOST_UNAUTHENTICATED)]
    assert is_closed(strangers[0])  # the oldest connections are closed
    with ray._connect("127.0.0.1", SECRET, SECONDS):
        workers.wait(1, SECONDS)
    for each in strangers:
        each.close()


def test_a_worker_with_another_secret_gives_up(port: int, workers: ray._Workers) -> None:
    with pytest.raises(QuorumTimeout, match="did not respond within 1 s"):
        ray._connect("127.0.0.1", "of-another-call", 1.0)


def test_the_port_is_free_again(port: int) -> None:
    for _ in range(3):
        with ray._Workers(SECRET):
            pass


def test_a_message_without_the_secret_ends_nothing(port: int) -> None:
    ended: list[int] = []
    arguments = (SECONDS, SECONDS, port, control_port.digest(SECRET))
    holding = threading.Thread(
        target=lambda: ended.append(control_port.serve_until_done(*arguments))
    )
    holding.start()
    with ray._connect("127.0.0.1", SECRET, SECONDS) as pod:
        for message in (control_port.DONE, b"wrong\n" + control_port.DONE):
            stranger(port, message).close()
        holding.join(0.5)
        assert holding.is_alive()
        pod.sendall(control_port.DONE)
        holding.join(SECONDS)
    assert ended == [0]


@pytest.mark.long
@pytest.mark.parametrize(("dismissed", "code"), [(True, 0), (False, 1)])
def test_a_lost_connection_ends_no_worker(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dismissed: bool, code: int
) -> None:
    fake_ray(tmp_path, monkeypatch)
    monkeypatch.setattr(ray, "_RECONNECT_SECONDS", SECONDS if dismissed else 1.0)
    call = Call("c1", Reference("f"), pack(None, "json", "x"), secret=SECRET)
    codes: list[int] = []
    working = threading.Thread(target=lambda: codes.append(ray.work(call, "127.0.0.1")))
    with ray._Workers(SECRET) as workers:
        working.start()
        workers.wait(1, SECONDS)
        workers._connections[0].shutdown(socket.SHUT_RDWR)
        if dismissed:
            with ray._connect("127.0.0.1", SECRET, SECONDS):
                workers.wait(2, SECONDS)  # the worker again, and another one
                workers.dismiss()
    working.join(SECONDS)
    assert codes == [code]


def fake_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ray"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/arguments\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.long
def test_the_ray_dashboard_listens_on_localhost(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray(tmp_path, monkeypatch)
    call = Call("c1", Reference("f"), pack(None, "json", "x"), workers=0, secret=SECRET)
    with ray.head(call):
        pass
    started, stopped = (tmp_path / "arguments").read_text().splitlines()
    assert "--dashboard-host=127.0.0.1" in started.split()
    assert stopped == "stop --force"
