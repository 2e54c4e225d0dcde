"""An API server over TLS that returns the identity of its client."""

import json
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from scripted_server import json_response
from torchrun_api.json import JsonObject
from torchrun_controller.client import Connection


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
    for name in ("server", "client", "renewed"):
        openssl("req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.crt", "-days", "2",
                *(["-extfile", "san.cnf"] if name == "server" else []))  # fmt: skip
    return folder


def serving_tls(pki: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / "server.crt", pki / "server.key")
    # From 3.13 on, Python is stricter about client certificates than any API server.
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


def plugin(folder: Path, **status: str) -> JsonObject:
    """An exec plugin that returns this status. {n} is replaced by the number of runs."""
    answer: JsonObject = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {**status},
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
