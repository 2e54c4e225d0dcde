"""The address of the server, its verification, and fresh credentials."""

import ssl
from pathlib import Path

import pytest
from msgspec.structs import replace

from scripted_server import ScriptedServer, Token, serving
from torchrun_controller.client import ConfigError, Connection, Disconnected
from torchrun_controller.client.credentials import (
    Endpoint,
    load_tls,
    tls_context,
)
from unit.client.tls_server import Write, make_pki, serving_tls, who, who_am_i


class TestInCluster:
    @pytest.fixture
    def pod(self, tmp_path: Path, pki: Path) -> Path:
        folder = tmp_path / "serviceaccount"
        folder.mkdir()
        (folder / "ca.crt").write_bytes((pki / "ca.crt").read_bytes())
        (folder / "token").write_text("mounted\n")
        (folder / "namespace").write_text("torchrun-system")
        return folder

    @staticmethod
    def environ(server: ScriptedServer) -> dict[str, str]:
        port = server.url.rsplit(":", 1)[1]
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}

    async def test_mounted_files_are_enough(self, server: ScriptedServer, pod: Path) -> None:
        environ = self.environ(server)
        connection = await Connection.load(environ=environ, service_account=pod)
        assert connection.namespace == "torchrun-system"
        assert await who_am_i(connection) == {"certificate": "", "authorization": "Bearer mounted"}

    async def test_namespace_and_ipv6(self, pod: Path) -> None:
        (pod / "namespace").unlink()
        environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
        connection = await Connection.load(environ=environ, service_account=pod)
        assert connection.endpoint.server == "https://[fd00::1]:443"
        assert connection.namespace == "default"

    async def test_a_kubeconfig_has_precedence(
        self, server: ScriptedServer, pod: Path, kubeconfig: Write
    ) -> None:
        environ = self.environ(server) | {"KUBECONFIG": kubeconfig({"token": "mine"})}
        connection = await Connection.load(environ=environ, service_account=pod)
        assert (await who_am_i(connection))["authorization"] == "Bearer mine"

    async def test_a_missing_ca(self, server: ScriptedServer, pod: Path) -> None:
        (pod / "ca.crt").unlink()
        with pytest.raises(ConfigError, match=r"serviceaccount cannot be used: .* certification"):
            await Connection.load(environ=self.environ(server), service_account=pod)

    async def test_an_unreadable_token(self, server: ScriptedServer, pod: Path) -> None:
        (pod / "token").unlink()
        (pod / "token").mkdir()
        with pytest.raises(ConfigError, match=r"serviceaccount cannot be used: .* token"):
            await Connection.load(environ=self.environ(server), service_account=pod)

    async def test_token_is_read_again_when_refused(
        self, server: ScriptedServer, pod: Path
    ) -> None:
        connection = await Connection.load(environ=self.environ(server), service_account=pod)
        (pod / "token").write_text("replaced")
        assert await connection.authorization() == "Bearer mounted"
        assert await connection.authorization(refused="Bearer mounted") == "Bearer replaced"

    async def test_the_ca_is_read_again_for_new_connections(
        self, server: ScriptedServer, pod: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "new").mkdir()
        other = make_pki(tmp_path / "new")
        now = [0.0]
        first = await Connection.load(environ=self.environ(server), service_account=pod)
        aged = Connection(first.endpoint, first._credentials, clock=lambda: now[0])
        async with aged.session("write") as transport, serving(who, serving_tls(other)) as replaced:
            assert (await transport.request("GET", "/who")).status == 200
            aged.endpoint = replace(aged.endpoint, server=replaced.url)
            with pytest.raises(Disconnected, match="certificate verify failed"):
                await transport.request("GET", "/who")
            (pod / "ca.crt").write_text("not a certificate")
            now[0] += 60
            with pytest.raises(Disconnected, match="certificate verify failed"):
                await transport.request("GET", "/who")
            (pod / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
            now[0] += 60
            assert (await transport.request("GET", "/who")).status == 200
            wrong_name = server.url.replace("127.0.0.1", "localhost")
            aged.endpoint = replace(aged.endpoint, server=wrong_name)
            with pytest.raises(Disconnected, match="certificate verify failed"):
                await transport.request("GET", "/who")


class TestFreshness:
    async def test_value_is_read_again_after_60_seconds(self) -> None:
        now = [100.0]
        token = Token("Bearer one")
        connection = Connection(Endpoint("http://x"), token, clock=lambda: now[0])
        assert await connection.authorization() == "Bearer one"
        token.value = "Bearer two"
        now[0] += 59
        assert await connection.authorization() == "Bearer one"
        now[0] += 1
        assert await connection.authorization() == "Bearer two"
        assert (token.reads, token.renewals) == (2, 0)

    async def test_a_refused_old_value_renews_nothing(self) -> None:
        token = Token("Bearer two")
        connection = Connection(Endpoint("http://x"), token)
        await connection.authorization()
        assert await connection.authorization(refused="Bearer one") == "Bearer two"
        assert token.renewals == 0

    async def test_an_unreadable_value_keeps_the_old_one(self) -> None:
        class Failing(Token):
            async def renew(self) -> str:
                raise ConfigError("the plugin is gone")

        connection = Connection(Endpoint("http://x"), Failing())
        value = await connection.authorization()
        assert await connection.authorization(refused=value) == value

    async def test_a_value_that_was_never_readable_is_an_error(self) -> None:
        class Failing(Token):
            async def read(self) -> str:
                raise ConfigError("no token")

        with pytest.raises(ConfigError, match="no token"):
            await Connection(Endpoint("http://x"), Failing()).authorization()


class TestVerification:
    def test_is_complete_except_for_extensions_of_the_ca(self, pki: Path) -> None:
        context = tls_context(str(pki / "ca.crt"))
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT

    async def test_another_ca_is_refused(self, server: ScriptedServer) -> None:
        connection = Connection(Endpoint(server.url, tls=load_tls(None)), Token())
        with pytest.raises(Disconnected, match="CERTIFICATE_VERIFY_FAILED"):
            await who_am_i(connection)

    async def test_another_name_is_refused(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"tls-server-name": "elsewhere.test"})
        with pytest.raises(Disconnected, match="Hostname mismatch"):
            await who_am_i(await Connection.load(path))

    async def test_the_tls_server_name_of_the_kubeconfig_counts(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"tls-server-name": "kubernetes.test"})
        assert (await who_am_i(await Connection.load(path)))["authorization"] == "Bearer t"

    async def test_cannot_be_disabled(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"insecure-skip-tls-verify": True})
        with pytest.raises(ConfigError, match="put the cluster's CA in certificate-authority"):
            await Connection.load(path)
