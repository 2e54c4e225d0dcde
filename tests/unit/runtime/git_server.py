"""Real git over https: git's own http-backend behind a small server with a private authority."""

import base64
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from unit.runtime.http_server import listening

PASSWORD = "pass-word-that-nobody-may-read"

BACKEND = Path(subprocess.check_output(["git", "--exec-path"], text=True).strip()) / (
    "git-http-backend"
)
CLEAN = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
}


def git(directory: Path, *arguments: str, stdin: bytes | None = None, **environment: str) -> str:
    ended = subprocess.run(
        ["git", *arguments],
        cwd=directory,
        env=CLEAN | environment,
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, (arguments, ended.stderr)
    return ended.stdout.decode().strip()


def repository(directory: Path, files: dict[str, bytes | str]) -> str:
    """Create a repository with one commit on main. A text is the target of a link. Returns the commit."""
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "--quiet", "--initial-branch=main")
    return commit(directory, files)


def commit(directory: Path, files: dict[str, bytes | str]) -> str:
    """Add a commit."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--allow-empty", "-m", "change")
    return git(directory, "rev-parse", "HEAD")


def plant(directory: Path, entries: list[tuple[str, bytes, bytes]]) -> str:
    """Write a commit with a malformed tree: (mode, name, content of the blob)."""
    if not (directory / ".git").exists():
        directory.mkdir(parents=True, exist_ok=True)
        git(directory, "init", "--quiet", "--initial-branch=main")
    body = b""
    for mode, name, content in entries:
        kind = "tree" if mode == "40000" else "blob"
        oid = (
            content.decode()
            if mode in ("40000", "160000")
            else git(directory, "hash-object", "-w", "-t", kind, "--stdin", stdin=content)
        )
        body += mode.encode() + b" " + name + b"\0" + bytes.fromhex(oid)
    tree = git(directory, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=body)
    commit = git(directory, "commit-tree", "-m", "planted", tree)
    git(directory, "update-ref", "refs/heads/main", commit)
    return commit


def authority(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> Path:
    """Create a certificate authority and a server certificate. Returns the path of ca.crt."""
    folder.mkdir(exist_ok=True)
    (folder / "san").write_text(f"subjectAltName={names}")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", *key, "-subj", "/CN=test ca", "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", "-new", *key[:-2], "-subj", "/CN=localhost", "-keyout", "key", "-out", "csr")
    openssl(
        *("x509", "-req", "-in", "csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "crt", "-days", "2", "-extfile", "san"),
    )
    return folder / "ca.crt"


@dataclass
class GitServer:
    """Serves the repositories of `root`.

    login: "user:password" or "" for everybody. cut: bytes of a pack after which the connection
    breaks. redirect: where everything is sent. version: 0 keeps the server to git's first protocol.
    before: called before each answer.
    """

    root: Path
    port: int = 0
    login: str = ""
    cut: int = 0
    redirect: str = ""
    version: int = 2
    paths: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None

    def url(self, name: str) -> str:
        return f"https://localhost:{self.port}/{name}"


@contextmanager
def serving(
    root: Path, folder: Path, address: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[GitServer]:
    """A server with the certificate `crt` and its `key` in `folder`."""
    state = GitServer(root)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")

    with listening(address, partial(_answer, state=state), tls=context) as state.port:
        yield state


def _answer(handler: BaseHTTPRequestHandler, state: GitServer) -> None:
    state.before()
    state.paths.append(handler.path)
    path, _, query = handler.path.partition("?")
    if state.redirect:
        handler.send_response(302)
        handler.send_header("Location", state.redirect + handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    authorization = handler.headers.get("Authorization", "")
    if state.login and authorization != "Basic " + base64.b64encode(state.login.encode()).decode():
        handler.send_response(401)
        handler.send_header("WWW-Authenticate", 'Basic realm="git"')
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    length = handler.headers.get("Content-Length", "")
    if handler.headers.get("Transfer-Encoding") == "chunked":
        body = b"".join(iter(lambda: _chunk(handler), b""))
    else:
        body = handler.rfile.read(int(length or 0))
    ended = subprocess.run(
        [str(BACKEND)],
        env=CLEAN
        | {
            "GIT_PROJECT_ROOT": str(state.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": handler.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": handler.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""),
            "REMOTE_ADDR": "127.0.0.1",
            **({"GIT_PROTOCOL": "version=2"} if state.version == 2 else {}),
            **state.environment,
        },
        input=body,
        capture_output=True,
        check=False,
    )
    head, _, content = ended.stdout.partition(b"\r\n\r\n")
    headers = [line.split(": ", 1) for line in head.decode().splitlines()]
    status = next((value for name, value in headers if name == "Status"), "200 OK")
    handler.send_response_only(int(status.split()[0]))
    for name, value in headers:
        if name != "Status":
            handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    cut = state.cut if state.cut and b"PACK" in content else len(content)
    handler.wfile.write(content[:cut])
    if cut < len(content):
        handler.wfile.flush()
        handler.close_connection = True


def _chunk(handler: BaseHTTPRequestHandler) -> bytes:
    size = int(handler.rfile.readline(), 16)
    data = handler.rfile.read(size)
    handler.rfile.readline()
    return data


def bare(source: Path, target: Path) -> None:
    """A bare copy, as servers keep them."""
    shutil.rmtree(target, ignore_errors=True)
    git(source, "clone", "--quiet", "--bare", str(source), str(target))
