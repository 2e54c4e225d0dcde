"""How kubeconfig and proxy settings affect the connection."""

import os
from pathlib import Path

import pytest
from aiohttp import web

from scripted_server import json_response, serving
from torchrun_controller.client import ConfigError, Connection, Disconnected
from torchrun_controller.client.credentials import (
    Kubeconfig,
    _environment_proxy,
)
from unit.client.tls_server import Write, plugin, who_am_i


class TestKubeconfig:
    async def test_token_and_context(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, context={"namespace": "mine"})
        connection = await Connection.load(path)
        assert connection.namespace == "mine"
        assert (await Connection.load(path, "other")).namespace == "other"
        assert await who_am_i(connection) == {"certificate": "", "authorization": "Bearer t"}

    async def test_a_context_selects_the_default_kubeconfig(
        self, kubeconfig: Write, tmp_path: Path
    ) -> None:
        (tmp_path / ".kube").mkdir()
        os.rename(kubeconfig({"token": "t"}), tmp_path / ".kube" / "config")
        connection = await Connection.load(context="other", environ={"HOME": str(tmp_path)})
        assert connection.namespace == "other"

    async def test_client_certificate(self, kubeconfig: Write, pki: Path) -> None:
        user = {
            "client-certificate": str(pki / "client.crt"),
            "client-key": str(pki / "client.key"),
        }
        connection = await Connection.load(kubeconfig(user))
        assert await who_am_i(connection) == {"certificate": "client", "authorization": ""}

    async def test_token_file_is_read_again(self, kubeconfig: Write, tmp_path: Path) -> None:
        now = [0.0]
        (tmp_path / "token").write_text("one")
        connection = await Connection.load(kubeconfig({"tokenFile": str(tmp_path / "token")}))
        aged = Connection(connection.endpoint, connection._credentials, clock=lambda: now[0])
        assert await aged.authorization() == "Bearer one"
        (tmp_path / "token").write_text("two")
        now[0] = 60.0
        assert await aged.authorization() == "Bearer two"

    async def test_plugin_with_a_token(self, kubeconfig: Write, tmp_path: Path) -> None:
        user = plugin(tmp_path, token="token-{n}", expirationTimestamp="2999-01-01T00:00:00Z")
        connection = await Connection.load(kubeconfig(user))
        first = await connection.authorization()
        assert first == "Bearer token-1"
        assert await connection.authorization(refused=first) == "Bearer token-2"

    async def test_plugin_with_a_certificate(
        self, kubeconfig: Write, tmp_path: Path, pki: Path
    ) -> None:
        certificate, key = ((pki / f"client.{end}").read_text() for end in ("crt", "key"))
        user = plugin(tmp_path, clientCertificateData=certificate, clientKeyData=key)
        connection = await Connection.load(kubeconfig(user))
        assert await who_am_i(connection) == {"certificate": "client", "authorization": ""}

    async def test_plugin_that_hangs(self, kubeconfig: Write, tmp_path: Path) -> None:
        path = kubeconfig(plugin(tmp_path, token="never"))
        with pytest.raises(ConfigError, match="its credential plugin did not respond within 0 s"):
            await Kubeconfig(path, None, timeout=0.0).endpoint()

    async def test_a_later_failure_of_the_plugin_keeps_the_old_token(
        self, kubeconfig: Write, tmp_path: Path
    ) -> None:
        now = [0.0]
        connection = await Connection.load(kubeconfig(plugin(tmp_path, token="token-{n}")))
        aged = Connection(connection.endpoint, connection._credentials, clock=lambda: now[0])
        value = await aged.authorization()
        (tmp_path / "plugin").unlink()
        assert await aged.authorization(refused=value) == value
        now[0] = 60.0
        assert await aged.authorization() == value

    async def test_a_certificate_that_becomes_invalid_is_no_crash(
        self, kubeconfig: Write, tmp_path: Path, pki: Path
    ) -> None:
        for end in ("crt", "key"):
            (tmp_path / f"c.{end}").write_bytes((pki / f"client.{end}").read_bytes())
        user = {
            "client-certificate": str(tmp_path / "c.crt"),
            "client-key": str(tmp_path / "c.key"),
        }
        connection = await Connection.load(kubeconfig(user))
        (tmp_path / "c.crt").write_text("not a certificate")
        assert await connection.authorization(refused="") == ""

    @pytest.mark.parametrize("text", ["", "{", "a: [1", "[]", "current-context: x"])
    async def test_an_invalid_kubeconfig(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "kubeconfig"
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"kubeconfig {path} cannot be used: "):
            await Connection.load(str(path))

    async def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="it does not exist"):
            await Connection.load(str(tmp_path / "none"))

    async def test_a_missing_context(self, kubeconfig: Write) -> None:
        with pytest.raises(ConfigError, match="context"):
            await Connection.load(kubeconfig({"token": "t"}), "nowhere")

    async def test_no_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="set --kubeconfig or KUBECONFIG"):
            await Connection.load(environ={"HOME": str(tmp_path)}, service_account=tmp_path)

    async def test_plain_http(self, kubeconfig: Write) -> None:
        async def ok(request: web.BaseRequest) -> web.Response:
            return json_response({})

        async with serving(ok) as plain:
            connection = await Connection.load(kubeconfig({}, cluster={"server": plain.url}))
            assert await who_am_i(connection) == {}


class TestProxy:
    async def test_of_the_kubeconfig(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"proxy-url": "http://127.0.0.1:1"})
        connection = await Connection.load(path)
        assert connection.endpoint.proxy == "http://127.0.0.1:1"
        with pytest.raises(Disconnected, match=r"127\.0\.0\.1:1"):
            await who_am_i(connection)

    @pytest.mark.parametrize(
        ("server", "bypass", "is_used"),
        [
            ("https://10.96.0.1:443", "10.0.0.0/8,.svc,.cluster.local", False),
            ("https://10.96.0.1:443", " 192.168.0.0/16 , 10.96.0.1/32", False),
            ("https://10.96.0.1:443", "10.96.0.77/24", False),
            ("https://10.96.0.1:443", "10.96.0.1:443", False),
            ("https://10.96.0.1:443", "10.96.0.1:6443", True),
            ("https://10.96.0.1:443", "11.0.0.0/8,10.0.0.0/33,fd00::/8,nonsense/8", True),
            ("https://[fd00::1]:6443", "fd00::/8", False),
            ("https://[fd00::1]:6443", "[fd00::1]", False),
            ("https://[fd00::1]:6443", "10.0.0.0/8", True),
            ("https://api.example.test", "10.0.0.0/8,.example.test", False),
            ("https://api.example.test", "10.0.0.0/8", True),
            ("https://api.example.test:6443", "*", False),
        ],
    )
    def test_no_proxy_networks_are_reached_directly(
        self, monkeypatch: pytest.MonkeyPatch, server: str, bypass: str, is_used: bool
    ) -> None:
        for name in ("no_proxy", "https_proxy"):
            monkeypatch.delitem(os.environ, name, raising=False)
        monkeypatch.setitem(os.environ, "HTTPS_PROXY", "http://p.test:1")
        monkeypatch.setitem(os.environ, "NO_PROXY", bypass)
        assert _environment_proxy(server) == ("http://p.test:1" if is_used else None)

    @pytest.mark.parametrize(("bypass", "proxy"), [("", "http://p.test:1"), ("127.0.0.1", None)])
    async def test_of_the_environment(
        self, kubeconfig: Write, monkeypatch: pytest.MonkeyPatch, bypass: str, proxy: str | None
    ) -> None:
        for name in ("no_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, "HTTPS_PROXY", "http://p.test:1")
        monkeypatch.setitem(os.environ, "NO_PROXY", bypass)
        assert (await Connection.load(kubeconfig({"token": "t"}))).endpoint.proxy == proxy
