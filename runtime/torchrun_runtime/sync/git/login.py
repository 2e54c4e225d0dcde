"""Git's access to a server: environment, configuration and two small programs, from the Secret.

No secret is in an argument, in the environment or in a file that this program writes. git asks the
first program for user name and password, which reads them from the mounted Secret, for the server
of the repository only. The second program runs ssh with its options, because git would pass
anything longer than a path to a shell.
"""

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from torchrun_runtime.sync.address import Location
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.secret import Secret

# Answers for the repository's server only: git also asks for the password of a proxy. Both prompts
# contain a URL: "Password for 'https://user@host': ".
_ASKPASS = """#!{python} -I
import pathlib, sys
from urllib.parse import urlsplit
url = urlsplit(sys.argv[1].partition("'")[2].rpartition("'")[0])
if (url.scheme, url.hostname, url.port or 443) != {server!r}:
    sys.exit("the Secret is not for " + url.netloc.rpartition("@")[2])
name = "username" if sys.argv[1].lower().startswith("username") else "password"
path = pathlib.Path({directory!r}, name)
print(path.read_text().rstrip("\\r\\n") if path.is_file() else "git" * (name == "username"))
"""
_SSH = """#!{python} -I
import os, sys
os.execv({ssh!r}, [{ssh!r}, *{options!r}, *sys.argv[1:]])
"""
_DEFAULT_SSH_PORT = 22


def environment(home: Path, scheme: str, proxy: str = "") -> dict[str, str]:
    """The environment of git and its helpers: no other variables, no configuration files.

    proxy: passed as a variable and not as an argument, because it may contain a password.
    """
    return {
        **({"https_proxy": proxy} if proxy else {}),
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": scheme,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def over_https(
    location: Location, addresses: Sequence[str], secret: Secret, home: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """Environment and configuration. addresses: empty with a proxy. Raises SyncError."""
    extra_env: dict[str, str] = {}
    configuration: dict[str, str] = {}
    authority = secret.path("ca.crt")
    if authority:
        configuration["http.sslCAInfo"] = str(authority)
    if secret.name and not (authority and secret.path("password") is None):
        secret.require("password", why="git over https logs in with username and password")
        script = home / "askpass"
        text = _ASKPASS.format(
            python=sys.executable,
            server=(location.scheme, location.host, location.port),
            directory=str(secret.directory),
        )
        _write_program(script, text)
        extra_env["GIT_ASKPASS"] = str(script)
    if addresses and not _is_address(location.host):
        listed = ",".join(f"[{a}]" if ":" in a else a for a in addresses)
        configuration["http.curloptResolve"] = f"{location.host}:{location.port}:{listed}"
    return extra_env, configuration


def over_ssh(
    location: Location, addresses: Sequence[str], secret: Secret, home: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """Environment and configuration. Raises SyncError."""
    secret.require(
        "ssh-privatekey",
        "known_hosts",
        why="git over ssh logs in with a key, to a host whose key is known (ssh-keyscan HOST)",
    )
    ssh = which("ssh")
    if ssh is None:
        message = "The image of the sync pod has no ssh. Remove volumes.workspace.image."
        raise SyncError("GitMissing", message, permanent=True)
    default_port = location.port == _DEFAULT_SSH_PORT
    known_as = location.host if default_port else f"[{location.host}]:{location.port}"
    options = {
        "BatchMode": "yes",
        "CheckHostIP": "no",
        "ConnectTimeout": "20",
        "ControlMaster": "no",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": known_as,
        "HostName": addresses[0],
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "IdentityFile": str(secret.path("ssh-privatekey")),
        "LogLevel": "ERROR",
        "PasswordAuthentication": "no",
        "PermitLocalCommand": "no",
        "ProxyCommand": "none",
        "ServerAliveCountMax": "3",
        "ServerAliveInterval": "20",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "UserKnownHostsFile": str(secret.path("known_hosts")),
    }
    words = ["-F", "none", *(w for k, v in options.items() for w in ("-o", f"{k}={v}"))]
    script = home / "ssh"
    _write_program(script, _SSH.format(python=sys.executable, ssh=ssh, options=words))
    return {"GIT_SSH": str(script), "GIT_SSH_VARIANT": "ssh"}, {}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)
