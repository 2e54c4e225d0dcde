"""Requests to the API server through kubectl."""

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from kubectl_torchrun.cluster.backoff import Retries
from kubectl_torchrun.cluster.client import RequestError, Unreachable, connect
from kubectl_torchrun.cluster.kubectl import (
    LastLines,
    Target,
    bounded_lines,
    proxy,
    resolve,
)
from kubectl_torchrun.cluster.slices import QUEUES
from kubectl_torchrun.errors import ClusterProblem
from kubectl_torchrun.upload.cache import LastUpload, UploadCache
from kubectl_torchrun.upload.tree import scan
from web_server import listening

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

HASTY = Retries(first=0.01, longest=0.05, give_up=120)


def kubeconfig(directory: Path, server: str, namespace: str = "") -> Target:
    context = {"cluster": "c", "user": "u", "namespace": namespace}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": context},
            {"name": "there", "context": {**context, "namespace": "far"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }
    path = directory / "kubeconfig"
    path.write_text(json.dumps(content))
    return Target(kubeconfig=str(path))


@asynccontextmanager
async def api_server(app: web.Application) -> AsyncIterator[str]:
    async with listening(web.AppRunner(app, shutdown_timeout=1)) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def proxy_to(url: str, directory: Path) -> AsyncIterator[Path]:
    """Started in a thread: kubectl waits for the server, which this event loop has to run."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, proxy(kubeconfig(directory, url)))


def running(socket: Path) -> bool:
    command = ["ps", "-ww", "-eo", "args"]  # -ww: ps may cut lines at 80 characters
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return any(str(socket) in line for line in listed.splitlines())


def gone(socket: Path) -> bool:
    return not running(socket) and not socket.parent.exists()


def test_the_proxy_has_a_private_socket_and_ends_with_the_work(tmp_path: Path) -> None:
    with proxy(kubeconfig(tmp_path, "http://127.0.0.1:9")) as socket:
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert running(socket)
    assert gone(socket)


def test_the_proxy_ends_when_the_work_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        proxy(kubeconfig(tmp_path, "http://127.0.0.1:9")) as socket,
    ):
        _ = 1 / 0
    assert gone(socket)


def test_a_proxy_that_is_slow_to_end_has_ended_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "rm"
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("rm")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with (
        pytest.raises(KeyboardInterrupt),
        proxy(kubeconfig(tmp_path, "http://127.0.0.1:9")) as socket,
    ):
        raise KeyboardInterrupt
    assert gone(socket)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_proxy_ends_with_a_killed_program(tmp_path: Path, number: int) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from kubectl_torchrun.cluster.kubectl import Target, proxy
        with proxy(Target(kubeconfig=sys.argv[1])) as socket:
            print(socket, flush=True)
            time.sleep(600)
        """
    )
    target = kubeconfig(tmp_path, "http://127.0.0.1:9")
    with subprocess.Popen(
        [sys.executable, "-c", script, target.kubeconfig],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as program:
        assert program.stdout is not None
        socket = Path(program.stdout.readline().strip())
        proxy_runs = running(socket)
        os.kill(program.pid, number if proxy_runs else signal.SIGKILL)
    assert proxy_runs
    deadline = time.monotonic() + 120
    while not gone(socket):
        assert time.monotonic() < deadline, "the proxy is still there"
        time.sleep(0.05)


def test_a_proxy_that_does_not_start_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{")
    with (
        pytest.raises(ClusterProblem, match=r"failed to start: .*broken"),
        proxy(Target(kubeconfig=str(tmp_path / "broken"))),
    ):
        pass


def test_a_kubectl_with_endless_output_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = tmp_path / "kubectl"
    talker.write_text('#!/bin/sh\necho "Starting to serve on $2"\nyes "I0102 a log line" >&2\n')
    talker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for _ in range(20):
        with proxy(Target()):
            pass


def test_lines_of_a_pipe_are_bounded() -> None:
    pipe = io.BytesIO(b"a\n" + b"x" * (3 << 20) + b"\n\nb\n" + b"y" * (1 << 20))
    assert [*bounded_lines(pipe)] == [b"a", b"x" * (1 << 20), b"", b"b", b"y" * (1 << 20)]


def test_the_last_lines_of_a_program_are_kept() -> None:
    command = ["sh", "-c", "seq 100000 >&2; printf 'last\\n\\n' >&2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = LastLines(process.stderr)
        process.wait(60)
        assert lines.after_end()[-2:] == ["100000", "last"]
        assert len(lines.after_end()) == 19


def test_a_missing_kubectl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterProblem, match="kubectl is not on PATH"), proxy(Target()):
        pass


def test_the_namespace_is_the_flags_or_the_contexts_or_default(tmp_path: Path) -> None:
    plain = kubeconfig(tmp_path, "http://127.0.0.1:9")
    assert resolve(plain).where.name == "default"
    assert resolve(plain._replace(context="there")).where.name == "far"
    assert resolve(plain._replace(context="there", namespace="mine")).where.name == "mine"


ONE = {"name": "here", "context": {"cluster": "c", "user": "u"}}
CONFIG = {
    "contexts": [ONE],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "u", "user": {}}],
}


@pytest.mark.parametrize(
    ("content", "context", "parts"),
    [
        (None, "", ("does not exist", "Correct --kubeconfig")),
        ("{", "", ("Cannot read kubeconfig", "yaml: line 1")),
        ("hello", "", ("Cannot read kubeconfig", "it is not a kubeconfig")),
        ("[1]", "", ("Cannot read kubeconfig", "it is not a kubeconfig")),
        ('{"clusters": "x"}', "", ("Cannot read kubeconfig", "clusters")),
        ("", "", ("has no contexts",)),
        (CONFIG, "", ("selects no context. Its contexts: here.", "--context")),
        (CONFIG, "there", ("has no context there. Its contexts: here.", "--context")),
        (CONFIG | {"current-context": "gone"}, "", ("has no context gone",)),
        (CONFIG | {"clusters": []}, "here", ("Context here of kubeconfig", "needs cluster c")),
        (CONFIG | {"users": []}, "here", ("Context here of kubeconfig", "needs user u")),
        (CONFIG | {"contexts": [ONE | {"context": {}}]}, "here", ("has no cluster",)),
    ],
)
def test_a_wrong_kubeconfig_is_named_with_what_to_do(
    tmp_path: Path, content: object, context: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ClusterProblem) as caught:
        resolve(Target(str(path), context))
    text = str(caught.value)
    assert all(part in text for part in (str(path), *parts)), text
    assert "minify" not in text


def test_without_a_kubeconfig_the_message_names_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(
        ClusterProblem, match=rf"{tmp_path}/\.kube/config does not exist[^~]*--local"
    ):
        resolve(Target())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "mine"))
    with pytest.raises(ClusterProblem, match=r"mine does not exist.*KUBECONFIG"):
        resolve(Target())


def test_a_command_keeps_the_context_with_which_it_starts(tmp_path: Path) -> None:
    """Its requests and its kubectl commands go to one cluster, even if another one is selected."""
    selection = resolve(kubeconfig(tmp_path, "http://127.0.0.1:9"))
    assert selection.pinned.flags() == [
        f"--kubeconfig={tmp_path / 'kubeconfig'}",
        "--context=here",
        "--namespace=default",
    ]


def test_the_memory_of_uploads_is_kept_by_cluster_and_namespace(tmp_path: Path) -> None:
    """Not by flags: another current context is another cluster."""
    (tmp_path / "train.py").write_text("x")
    contexts = {"a": "https://a", "b": "https://b", "again": "https://a"}
    config = {
        "contexts": [{"name": n, "context": {"cluster": n, "user": "u"}} for n in contexts],
        "clusters": [{"name": n, "cluster": {"server": url}} for n, url in contexts.items()],
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "kubeconfig"

    def memory(current: str, context: str = "", namespace: str = "") -> UploadCache:
        path.write_text(json.dumps({**config, "current-context": current}))
        return UploadCache(resolve(Target(str(path), context, namespace)).where, tmp_path)

    look = memory("a").digest(scan(tmp_path))
    memory("a").record(LastUpload("run", look.manifest))
    for same in (memory("again"), memory("b", "a"), memory("a", namespace="default")):
        sent = same.last_upload()
        assert sent is not None
        assert (sent.job, sent.manifest.sha256) == ("run", look.manifest.sha256)
    for other in (memory("b"), memory("a", "b"), memory("a", namespace="ns")):
        assert other.last_upload() is None


async def test_a_refusal_has_status_and_message(
    tmp_path: Path,
) -> None:
    async def handle(_: web.Request) -> web.Response:
        status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "not you"}
        return web.json_response(status, status=403)

    app = web.Application()
    app.router.add_get("/apis/torchrun.ai/v1alpha1/namespaces/ns/torchrunqueues", handle)
    async with (
        api_server(app) as url,
        proxy_to(url, tmp_path) as socket,
        connect(socket, "ns") as api,
    ):
        with pytest.raises(RequestError, match="not you") as caught:
            await api.list(QUEUES)
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


async def test_an_unreachable_server_differs_from_a_refusal(tmp_path: Path) -> None:
    with proxy(kubeconfig(tmp_path, "http://127.0.0.1:9")) as socket:
        async with connect(socket, "ns") as api:
            with pytest.raises(Unreachable, match="refused"):
                await api.list(QUEUES)


async def test_the_pod_proxy_accepts_ranges_and_a_busy_server_is_retried(tmp_path: Path) -> None:
    received = bytearray()
    asked = 0

    async def put(request: web.Request) -> web.Response:
        assert request.headers["Content-Range"] == "bytes 0-8388607/8388608"
        assert request.headers["X-Torchrun-Sha256"] == "ab"
        received.extend(await request.read())
        return web.json_response({"offset": len(received)}, status=409)

    async def busy(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked < 3:
            status = {"kind": "Status", "code": 429, "message": "storage is (re)initializing"}
            return web.json_response(status, status=429)
        return web.json_response({"items": [{"metadata": {"name": "q"}}]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_put("/api/v1/namespaces/ns/pods/p:8080/proxy/v1/upload", put)
    app.router.add_get("/apis/torchrun.ai/v1alpha1/namespaces/ns/torchrunqueues", busy)

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(128):
            yield b"x" * 65536

    headers = {
        "Content-Range": "bytes 0-8388607/8388608",
        "Content-Length": "8388608",
        "X-Torchrun-Sha256": "ab",
    }
    async with (
        api_server(app) as url,
        proxy_to(url, tmp_path) as socket,
        connect(socket, "ns", HASTY) as api,
    ):
        answer = await api.ask_pod("p", "PUT", "/v1/upload", headers=headers, content=blocks())
        assert answer == (409, b'{"offset": 8388608}')
        assert received == b"x" * 8388608
        assert [queue.metadata.name for queue in (await api.list(QUEUES)).items] == ["q"]


async def test_log_lines_arrive_without_delay(tmp_path: Path) -> None:
    read = asyncio.Event()

    async def log(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await response.write(b"one\n")
        await asyncio.wait_for(
            read.wait(), 120
        )  # the second line is written after the first has arrived
        await response.write(b"two\r\xe2\x80\xa8three\n")
        return response

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/pods/p/log", log)
    lines = []
    async with (
        api_server(app) as url,
        proxy_to(url, tmp_path) as socket,
        connect(socket, "ns") as api,
        api.log("p", "trainer", {}) as stream,
    ):
        async for line in stream:
            lines.append(line)
            read.set()
    assert lines == [b"one\n", b"two\r\xe2\x80\xa8three\n"]
