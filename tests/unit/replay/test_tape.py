"""The format and the contents of a recording."""

import asyncio
import io
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from frames import bookmark, frame, page
from frames import pod as a_pod
from scripted_server import connection, json_response, serving, streamed
from torchrun_controller import logs
from torchrun_controller.replay.__main__ import main
from torchrun_controller.replay.record import RecordingTransport
from torchrun_controller.replay.tape import Head, Line, Tape, TapeError, read
from unit.replay.film import DISCOVERY, NEEDED, Film, job, queue

HEAD = Head(controller="0.1.0", time=datetime(2026, 1, 2, tzinfo=UTC), namespaces=("ml",))
SECRET = "hunter2"
PODS = "/api/v1/pods?labelSelector=torchrun-job-name"
COMMAND = (sys.executable, "-m", "torchrun_controller.replay")


def read_back(path: Path) -> list[Line]:
    with path.open("rb") as file:
        return list(read(file)[1])


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command in this process. Returns exit code, stdout and stderr."""
    monkeypatch.setattr(logs, "configure", lambda *settings: None)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(str(end.code))
        return code, *capsys.readouterr()

    return run


def test_a_record_is_read_back(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "run", HEAD, 10_000)
    tape.opens(PODS)
    tape.frame(PODS, b'{"type": "ADDED", "object": {"metadata": {"name": "a"}}}')
    tape.frame(PODS, b'{"type": "ADD')
    tape.page(PODS, b'{\n "items": [] }\n', first=True)
    tape.page(PODS, b"<html>", first=True)
    tape.close()
    with (tmp_path / "run").open("rb") as file:
        head, lines = read(file)
        opened, added, torn, listed = lines
    assert head == HEAD
    assert (opened.resource, opened.source, opened.opens) == ("pods", PODS, True)
    assert bytes(added.frame) == b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}'
    assert torn.text == '{"type": "ADD'
    assert (bytes(listed.page), listed.first) == (b'{"items":[]}', True)


def test_a_recording_is_private_and_not_overwritten(tmp_path: Path) -> None:
    Tape(tmp_path / "run", HEAD, 10_000).close()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Tape(tmp_path / "run", HEAD, 10_000)


def test_a_recording_at_its_limit_ends_with_a_complete_line(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "run", HEAD, 1_000)
    for _ in range(100):
        tape.frame(PODS, b'{"type":"ADDED"}')
    tape.close()
    assert tape.full.is_set()
    assert 500 < (tmp_path / "run").stat().st_size <= 1_000
    assert len(read_back(tmp_path / "run")) == tape.lines - 1


def test_secrets_are_redacted_and_names_stay(tmp_path: Path) -> None:
    container = {
        "name": "trainer",
        "command": ["python", SECRET],
        "args": [SECRET],
        "env": [{"name": "TOKEN", "value": SECRET}, {"name": "REF", "valueFrom": {"x": "y"}}],
    }
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": SECRET}
    spec = {"command": SECRET, "setupCommand": SECRET, "env": [{"name": "A", "value": SECRET}]}
    bodies: list[Any] = [
        {"metadata": {"name": "train", "annotations": annotations}, "spec": spec},
        {"spec": {"template": {"spec": {"containers": [container]}}}},
    ]
    tape = Tape(tmp_path / "run", Head(time=HEAD.time, redacted=True), 10_000)
    for body in bodies:
        tape.frame(PODS, frame("ADDED", body))
    tape.page(PODS, json.dumps({"items": bodies}).encode(), first=True)
    tape.frame(PODS, b'{"torn": "' + SECRET.encode())
    tape.close()
    text = (tmp_path / "run").read_text()
    assert SECRET not in text
    for kept in ("train", "TOKEN", "REF", "valueFrom", '"redacted":true'):
        assert kept in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1 is not the head"),
        (b'{"kind":"List"}\n', "line 1 is not the head"),
        (b'{"recording":9,"time":"2026-01-02T00:00:00Z"}\n', "version 9"),
        (Film().file() + b'{"time":1}\n', "line 2 cannot be read"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(TapeError, match=message):
        list(read(io.BytesIO(text))[1])


def test_a_wrong_file_is_one_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run").write_bytes(Film().file() + b'{"time":1}\n')
    code, _, err = cli("plans", tmp_path / "run")
    assert code == 1
    assert ["line 2" in line for line in err.splitlines()] == [True]


def test_a_cut_last_line_is_ignored() -> None:
    film = Film().starts(job(numNodes=1), queue())
    whole = film.file()
    assert len(list(read(io.BytesIO(whole[:-9]))[1])) == len(film.lines) - 1


def test_the_cli_shows_one_job_as_text_and_as_json(tmp_path: Path, cli: Cli) -> None:
    film = Film().starts(job("one", numNodes=1), job("two", numNodes=1), queue())
    (tmp_path / "run").write_bytes(film.file())
    _, text, _ = cli("plans", tmp_path / "run", "--job", "ml/two", "--runtime-image", "mine:1")
    assert "ml/one" not in text
    assert "    apply jobs.batch/two; status " in text
    assert '    +   "resource": "jobs.batch",' in text
    _, out, _ = cli("plans", tmp_path / "run", "--job", "ml/two", "--json")
    decision = json.loads(
        out.splitlines()[-1]
    )  # after the lines of the log, which is not configured here
    assert (decision["job"], decision["apply"][0]["name"]) == ("ml/two", "two")
    _, _, err = cli("plans", tmp_path / "run", "--job", "ml/none")
    assert "no Plans" in err
    assert cli("plans", tmp_path / "run", "--job", "none")[0] == 2


async def test_all_traffic_of_the_transport_is_recorded(tmp_path: Path) -> None:
    chunks = [frame("ADDED", a_pod("a", 5))[:30], frame("ADDED", a_pod("a", 5))[30:], bookmark(9)]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "watch" in request.query:
            return await streamed(request, *chunks)
        return web.Response(body=page([a_pod("b", 3)], 9))

    tape = Tape(tmp_path / "run", HEAD, 10_000)
    async with serving(answer) as server, connection(server.url).session("test") as session:
        taped = RecordingTransport(session, tape)
        query = {"labelSelector": "torchrun-job-name"}
        await taped.request("GET", "/api/v1/pods", query=query)
        await taped.request("GET", "/api/v1/pods", query={**query, "continue": "x"})
        for begins in ({"sendInitialEvents": "true"}, {"resourceVersion": "9"}):
            watch = {**query, "watch": "true", **begins}
            async with taped.stream("/api/v1/pods", query=watch, total=30) as got:
                assert b"".join([chunk async for chunk in got]) == b"".join(chunks)
    tape.close()
    first, further, opened, *frames = read_back(tmp_path / "run")
    assert (first.first, further.first, opened.opens) == (True, False, True)
    assert [bytes(line.frame) + b"\n" for line in frames] == [
        frame("ADDED", a_pod("a", 5)),
        bookmark(9),
    ] * 2
    assert {line.source for line in (first, opened, *frames)} == {PODS}


async def test_recording_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    opened: set[str] = set()
    all_opened = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/apis":
            return json_response(DISCOVERY)
        if "watch" not in request.query:
            return web.Response(body=page([], 9))
        response = await streamed(request)
        opened.add(request.path)
        if len(opened) == len(NEEDED) + 2:
            all_opened.set()
        await server.hang()
        return response

    async with serving(answer) as server:
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps(a_kubeconfig(server.url)))
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "record", str(tmp_path / "run"), "--kubeconfig", str(kubeconfig)),
            env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"},
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(300):
            await all_opened.wait()
            process.send_signal(signal.SIGINT)
            _, stderr = await process.communicate()
    assert process.returncode == 0, stderr
    lists = [line for line in read_back(tmp_path / "run") if line.first and line.source != "/apis"]
    assert len(lists) == len(NEEDED) + 2


def a_kubeconfig(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
