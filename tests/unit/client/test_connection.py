"""Where the server is, that it is verified, and that credentials stay fresh."""

import json
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import yarl
from aiohttp import web

from scripted_server import ScriptedServer, Token, json_response, serving
from torchrun_api.json import JsonObject
from torchrun_controller.client import ConfigError, Connection, Disconnected
from torchrun_controller.client.credentials import (
    Endpoint,
    Kubeconfig,
    _environment_proxy,
    tls_context,
)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA without the extensions of RFC 5280, as many clusters have; a server and a client."""
    return make_pki(tmp_path_factory.mktemp("pki"))


def make_pki(folder: Path) -> Path:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (folder / "ca.cnf").write_text(
        "[req]\ndistinguished_name=dn\nx509_extensions=ca\n[dn]\n[ca]\nbasicConstraints=CA:true\n"
    )
    (folder / "san.cnf").write_text("subjectAltName=IP:127.0.0.1,DNS:kubernetes.test\n")
    openssl("req", "-x509", *key, "-config", "ca.cnf", "-subj", "/CN=ca", "-keyout", "ca.key",
            "-out", "ca.crt", "-days", "2")  # fmt: skip
    for name in ("server", "client"):
        openssl("req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.crt", "-days", "2",
                *(["-extfile", "san.cnf"] if name == "server" else []))  # fmt: skip
    return folder


@pytest.fixture
async def server(pki: Path) -> AsyncIterator[ScriptedServer]:
    """An https server that says who asks: its client certificate and its Authorization header."""

    async with serving(who, serving_tls(pki)) as running:
        yield running


def serving_tls(pki: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / "server.crt", pki / "server.key")
    # From Python 3.13 on it is stricter than any API server with the certificates of clients.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    tls.verify_mode = ssl.CERT_OPTIONAL
    return tls


async def who(request: web.BaseRequest) -> web.Response:
    assert request.transport is not None
    peer = request.transport.get_extra_info("peercert")
    subject = dict(pair for part in peer["subject"] for pair in part) if peer else {}
    authorization = request.headers.get("Authorization", "")
    return json_response(
        {"certificate": subject.get("commonName", ""), "authorization": authorization}
    )


Write = Callable[..., str]


@pytest.fixture
def kubeconfig(tmp_path: Path, server: ScriptedServer, pki: Path) -> Write:
    """Writes a kubeconfig for the server; arguments change its user, cluster and context."""

    def write(user: JsonObject, **more: JsonObject) -> str:
        cluster = {"server": server.url, "certificate-authority": str(pki / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {**cluster, **more.get("cluster", {})}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [
                {
                    "name": "here",
                    "context": {"cluster": "c", "user": "u", **more.get("context", {})},
                },
                {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
            ],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    return write


def plugin(folder: Path, **status: str) -> JsonObject:
    """An exec plugin that gives this status, with {n} replaced by how often it was run."""
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": status,
    }
    runs, program = folder / "runs", folder / "plugin"
    program.write_text(
        f"#!{sys.executable}\n"
        f"with open({str(runs)!r}, 'a+') as runs: runs.write('x'); n = runs.tell()\n"
        f"print({json.dumps(answer)!r}.replace('{{n}}', str(n)))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": answer["apiVersion"], "command": str(program)}}


async def who_am_i(connection: Connection) -> dict[str, str]:
    async with connection.session("write") as transport:
        answer: dict[str, str] = json.loads((await transport.request("GET", "/who")).body)
        return answer


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

    async def test_mounted_files_are_all_it_takes(self, server: ScriptedServer, pod: Path) -> None:
        environ = self.environ(server)
        connection = await Connection.load(environ=environ, service_account=pod)
        assert connection.namespace == "torchrun-system"
        assert await who_am_i(connection) == {"certificate": "", "authorization": "Bearer mounted"}

    def test_kubernetes_asyncio_is_not_imported_for_it(self) -> None:
        program = (
            "import sys, torchrun_controller.client; print('kubernetes_asyncio' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        assert done.stdout.split() == [b"False"]

    async def test_namespace_and_ipv6(self, pod: Path) -> None:
        (pod / "namespace").unlink()
        environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
        connection = await Connection.load(environ=environ, service_account=pod)
        assert connection.endpoint.server == "https://[fd00::1]:443"
        assert connection.namespace == "default"

    async def test_kubeconfig_goes_first(
        self, server: ScriptedServer, pod: Path, kubeconfig: Write
    ) -> None:
        environ = self.environ(server) | {"KUBECONFIG": kubeconfig({"token": "mine"})}
        connection = await Connection.load(environ=environ, service_account=pod)
        assert (await who_am_i(connection))["authorization"] == "Bearer mine"

    async def test_ca_that_is_missing(self, server: ScriptedServer, pod: Path) -> None:
        (pod / "ca.crt").unlink()
        with pytest.raises(ConfigError, match=r"cannot read the cluster's CA from .*ca\.crt"):
            await Connection.load(environ=self.environ(server), service_account=pod)

    async def test_token_that_cannot_be_read(self, server: ScriptedServer, pod: Path) -> None:
        (pod / "token").unlink()
        (pod / "token").mkdir()
        with pytest.raises(ConfigError, match="cannot read the service account's token"):
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
            transport._server = yarl.URL(replaced.url)
            with pytest.raises(Disconnected, match="certificate verify failed"):
                await transport.request("GET", "/who")
            (pod / "ca.crt").write_text("not a certificate")
            now[0] += 60
            with pytest.raises(Disconnected, match="certificate verify failed"):
                await transport.request("GET", "/who")
            (pod / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
            now[0] += 60
            assert (await transport.request("GET", "/who")).status == 200
            transport._server = yarl.URL(server.url.replace("127.0.0.1", "localhost"))
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

    async def test_an_old_value_that_was_refused_renews_nothing(self) -> None:
        token = Token("Bearer two")
        connection = Connection(Endpoint("http://x"), token)
        await connection.authorization()
        assert await connection.authorization(refused="Bearer one") == "Bearer two"
        assert token.renewals == 0

    async def test_a_value_that_cannot_be_read_again_stays(self) -> None:
        class Failing(Token):
            async def renew(self) -> str:
                raise ConfigError("the plugin is gone")

        connection = Connection(Endpoint("http://x"), Failing())
        value = await connection.authorization()
        assert await connection.authorization(refused=value) == value

    async def test_a_value_that_was_never_read_is_an_error(self) -> None:
        class Failing(Token):
            async def read(self) -> str:
                raise ConfigError("no token")

        with pytest.raises(ConfigError, match="no token"):
            await Connection(Endpoint("http://x"), Failing()).authorization()


class TestVerification:
    def test_is_full_but_for_the_extensions_of_the_ca(self, pki: Path) -> None:
        context = tls_context(str(pki / "ca.crt"))
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT

    async def test_another_ca_is_refused(self, server: ScriptedServer) -> None:
        connection = Connection(Endpoint(server.url, tls=tls_context(None)), Token())
        with pytest.raises(Disconnected, match="CERTIFICATE_VERIFY_FAILED"):
            await who_am_i(connection)

    async def test_another_name_is_refused(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"tls-server-name": "elsewhere.test"})
        with pytest.raises(Disconnected, match="Hostname mismatch"):
            await who_am_i(await Connection.load(path))

    async def test_the_name_of_the_kubeconfig_counts(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"tls-server-name": "kubernetes.test"})
        assert (await who_am_i(await Connection.load(path)))["authorization"] == "Bearer t"

    async def test_cannot_be_switched_off(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, cluster={"insecure-skip-tls-verify": True})
        with pytest.raises(ConfigError, match="put the cluster's CA in certificate-authority"):
            await Connection.load(path)


class TestKubeconfig:
    async def test_token_and_context(self, kubeconfig: Write) -> None:
        path = kubeconfig({"token": "t"}, context={"namespace": "mine"})
        connection = await Connection.load(path)
        assert connection.namespace == "mine"
        assert (await Connection.load(path, "other")).namespace == "other"
        assert await who_am_i(connection) == {"certificate": "", "authorization": "Bearer t"}

    async def test_context_alone_means_the_one_at_home(
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
        with pytest.raises(ConfigError, match="its credential plugin gave no answer within 0 s"):
            await Kubeconfig(path, None, timeout=0.0).endpoint()

    async def test_plugin_that_fails_later_leaves_the_old_token(
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

    async def test_certificate_that_goes_bad_later_is_no_crash(
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
    async def test_a_file_that_is_no_kubeconfig(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "kubeconfig"
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"kubeconfig {path} cannot be used: "):
            await Connection.load(str(path))

    async def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="it does not exist"):
            await Connection.load(str(tmp_path / "none"))

    async def test_a_context_that_is_not_there(self, kubeconfig: Write) -> None:
        with pytest.raises(ConfigError, match="context"):
            await Connection.load(kubeconfig({"token": "t"}), "nowhere")

    async def test_nothing_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give --kubeconfig, set KUBECONFIG"):
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
    def test_the_networks_of_no_proxy_are_reached_without_it(
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
