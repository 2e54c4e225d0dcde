"""The HTTP pages over real sockets."""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import anyio
import pytest
import structlog
import uvloop

from torchrun_controller.client.errors import explain_refusal
from torchrun_controller.leader import NoElection
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.serving.checks import (
    Check,
    caches_synced,
    leads_or_stands_by,
    watches_alive,
)
from torchrun_controller.serving.server import HttpServer


def server(
    address: str = "127.0.0.1",
    port: int = 0,
    metrics: Metrics | None = None,
    live: Mapping[str, Check] | None = None,
    ready: Mapping[str, Check] | None = None,
) -> HttpServer:
    return HttpServer(
        address, port, metrics=metrics or Metrics(), live=live or {}, ready=ready or {}
    )


async def fetch(
    to: HttpServer, path: str, *, method: str = "GET", host: str = "127.0.0.1", **options: Any
) -> tuple[int, str, Mapping[str, str]]:
    async with aiohttp.ClientSession() as session:
        url = f"http://{host}:{to.port}{path}"
        async with session.request(method, url, **options) as response:
            return response.status, await response.text(), response.headers


@pytest.fixture
def root_level() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    level = root.level
    yield root
    root.setLevel(level)
    structlog.reset_defaults()  # of the filter that a level sets, for the tests that read lines


async def test_checks_run_at_each_probe_and_list_their_reasons() -> None:
    reasons = {"one": "", "two": ""}
    checks = {name: partial(reasons.__getitem__, name) for name in reasons}
    subject = server(live=checks, ready={})
    async with subject.running():
        assert (await fetch(subject, "/healthz"))[:2] == (200, "[+] one ok\n[+] two ok\n")
        reasons["two"] = "it is broken"
        status, text, _ = await fetch(subject, "/healthz")
        assert (status, text) == (503, "[+] one ok\n[-] two: it is broken\n")
        assert (await fetch(subject, "/readyz"))[0] == 200


async def test_a_note_is_listed_and_fails_nothing() -> None:
    notes = {"machines": lambda: "lost machines are not detected", "others": lambda: ""}
    subject = HttpServer("127.0.0.1", 0, metrics=Metrics(), live={}, ready={}, notes=notes)
    async with subject.running():
        status, text, _ = await fetch(subject, "/readyz")
        assert (status, text) == (200, "[!] machines: lost machines are not detected\n")
        assert "machines" not in (await fetch(subject, "/healthz"))[1]


async def test_readiness_has_checks_of_its_own() -> None:
    subject = server(ready={"caches": lambda: "not listed yet"})
    async with subject.running():
        assert (await fetch(subject, "/readyz"))[0] == 503
        assert (await fetch(subject, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics"),
    ],
)
async def test_metrics_have_the_requested_format(accept: str, expected: str) -> None:
    metrics = Metrics()
    metrics.stale_sync_skips.inc()
    subject = server(metrics=metrics)
    async with subject.running():
        status, text, headers = await fetch(subject, "/metrics", headers={"Accept": accept})
    assert status == 200
    assert headers["Content-Type"].startswith(expected)
    assert "torchrun_stale_sync_skips_total 1.0" in text
    assert text.endswith("# EOF\n") == expected.startswith("application")


async def test_metrics_are_read_on_the_loop_and_rendered_in_a_thread() -> None:
    metrics = Metrics()
    threads: dict[str, int] = {}

    def age() -> float:
        threads["read"] = threading.get_ident()
        return 0.0

    original = type(metrics.snapshot()).render

    def render(self: Any, accept: str) -> tuple[bytes, str]:
        threads["render"] = threading.get_ident()
        return original(self, accept)

    metrics.watch_age("pods", age)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrun_controller.metrics.registry.MetricsSnapshot.render", render)
        subject = server(metrics=metrics)
        async with subject.running():
            await fetch(subject, "/metrics")
    assert threads["read"] == threading.get_ident()
    assert threads["render"] != threading.get_ident()


async def test_the_log_level_is_set_from_localhost(root_level: logging.Logger) -> None:
    subject = server()
    async with subject.running():
        put = {"method": "PUT"}
        assert (await fetch(subject, "/loglevel", **put, data="error\n"))[:2] == (200, "error\n")
        assert root_level.level == logging.ERROR
        status, text, _ = await fetch(subject, "/loglevel", **put, data="loud")
        assert status == 400
        assert "must be one of debug, info, warning, error" in text
        assert (await fetch(subject, "/loglevel", **put, data=b"\xff"))[0] == 400
        charset = {"Content-Type": "text/plain; charset=none"}
        assert (await fetch(subject, "/loglevel", **put, data="debug", headers=charset))[0] == 400
        assert (await fetch(subject, "/loglevel", **put, data="x" * 2000))[0] == 413
        assert (await fetch(subject, "/loglevel"))[0] == 405
        proxied = {"X-Forwarded-For": "1.2.3.4"}
        status, _, _ = await fetch(subject, "/loglevel", **put, data="debug", headers=proxied)
        assert status == 403
    assert root_level.level == logging.ERROR


def own_address() -> str:
    """A non-loopback address of this machine; "" without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation range; nothing is sent
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@pytest.mark.skipif(not own_address(), reason="this machine has no address but localhost")
async def test_the_log_level_is_not_set_from_elsewhere(root_level: logging.Logger) -> None:
    subject = server(address="")
    before = root_level.level
    async with subject.running():
        status, text, _ = await fetch(
            subject, "/loglevel", method="PUT", host=own_address(), data="debug"
        )
    assert status == 403
    assert "kubectl port-forward" in text
    assert root_level.level == before


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("dualstack", [True, False])
def test_no_address_means_every_interface(
    runner: Callable[[Coroutine[Any, Any, None]], None],
    dualstack: bool,
    monkeypatch: pytest.MonkeyPatch,
    root_level: logging.Logger,
) -> None:
    if dualstack and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dualstack)

    async def main() -> None:
        subject = server(address="", live={"a": lambda: ""})
        async with subject.running():
            assert (await fetch(subject, "/healthz"))[0] == 200
            assert (await fetch(subject, "/loglevel", method="PUT", data="error"))[0] == 200
            assert dualstack == await reachable(subject, "[::1]")

    runner(main())


async def reachable(subject: HttpServer, host: str) -> bool:
    try:
        return (await fetch(subject, "/healthz", host=host))[0] == 200
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_an_address_of_ipv6() -> None:
    subject = server(address="::1")
    async with subject.running():
        assert await reachable(subject, "[::1]")
        assert not await reachable(subject, "127.0.0.1")


async def test_a_port_in_use_is_named_and_nothing_stays_open() -> None:
    first = server()
    async with first.running():
        second = server(port=first.port)
        with pytest.raises(OSError, match=f"{first.port}") as caught:
            async with second.running():
                raise AssertionError("it must not run")
        assert caught.value.errno == errno.EADDRINUSE
    async with second.running():
        assert (await fetch(second, "/healthz"))[0] == 200


def test_a_watch_without_activity_hangs() -> None:
    ages = {"pods": 5.0, "jobs.batch": 20.0}
    check = watches_alive({name: partial(ages.__getitem__, name) for name in ages}, bound=20)
    assert check() == ""
    ages["jobs.batch"] = 20.6
    assert check() == "informers do not respond: jobs.batch for 21 s"


def test_unsynced_caches_are_named_with_their_reason() -> None:
    unsynced = ["jobs.batch (waiting for the first list)", "pods (forbidden)"]
    check = caches_synced(lambda: iter(unsynced))
    assert check() == "not listed yet: jobs.batch (waiting for the first list), pods (forbidden)"
    unsynced.clear()
    assert check() == ""


def test_leading_and_standing_by_are_both_ready() -> None:
    solo = NoElection()
    check = leads_or_stands_by(solo)
    assert check() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solo, "may_write", bool)
        assert check() == "the lease is lost; the process is stopping"
        solo.elected = anyio.Event()
        assert check() == ""
    solo.problem = "cannot get lease a/b: 403"
    assert check() == "cannot get lease a/b: 403"


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (403, "grant the controller's role the verb watch on torchrunjobs.torchrun.ai"),
        (404, "install the CustomResourceDefinition of torchrunjobs.torchrun.ai"),
        (0, "the API server could not be reached"),
        (500, "HTTP 500"),
    ],
)
def test_a_refusal_has_a_remedy(status: int, advice: str) -> None:
    text = explain_refusal("watch", "torchrunjobs.torchrun.ai", status, "why")
    assert text == f"cannot watch torchrunjobs.torchrun.ai: {advice} (why)"
