"""Real git over ssh: sshd with a host key of its own, for the user that runs the tests."""

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_port
from torchrun_cluster import packages
from unit.runtime.git_server import repository

UP_WITHIN = 120.0


@dataclass
class Sshd:
    """sshd on its own port, for the current user and one key."""

    folder: Path
    host: str
    port: int

    @property
    def url(self) -> str:
        user = pwd.getpwuid(os.getuid()).pw_name
        return f"ssh://{user}@{self.host}:{self.port}{self.folder}/train"

    def known_hosts(self, key: str = "host") -> str:
        kind, value = (self.folder / f"{key}.pub").read_text().split()[:2]
        return f"[{self.host}]:{self.port} {kind} {value}\n"


def make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def serving(
    folder: Path, host: str = "127.0.0.1", port: int = 0, inside: Sequence[str] = ()
) -> Iterator[Sshd]:
    """A server for the repository `train` in `folder`, on one address.

    port: 0 for any free port. inside: a command prefix that runs its arguments in the network
    namespace of the address.
    """
    packages.ensure({"sshd": "openssh-server", "ssh": "openssh-client"})
    program = packages.find("sshd")
    assert program
    for name in ("host", "other", "user"):
        make_key(folder / name)
    # The command in authorized_keys runs for every login: only the git server.
    serve = folder / "serve"
    serve.write_text(
        f"#!{sys.executable} -I\nimport os, shlex\n"
        "words = shlex.split(os.environ['SSH_ORIGINAL_COMMAND'])\n"
        "assert words[0] == 'git-upload-pack' and len(words) == 2\n"
        "os.execvp(words[0], words)\n"
    )
    serve.chmod(0o755)
    public = (folder / "user.pub").read_text()
    (folder / "authorized").write_text(f'restrict,command="{serve}" {public}')
    port = port or free_port(host)
    (folder / "config").write_text(
        f"ListenAddress {host}:{port}\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nAcceptEnv GIT_PROTOCOL\n"
        f"PermitRootLogin prohibit-password\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(
            exist_ok=True
        )  # the chroot directory that the package of sshd creates
    with (folder / "log").open("wb") as log:
        command = [*inside, program, "-D", "-e", "-f", str(folder / "config")]
        started = subprocess.Popen(command, stderr=log)
    try:
        deadline = time.monotonic() + UP_WITHIN
        while f"Server listening on {host} port {port}" not in (folder / "log").read_text():
            assert started.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        repository(folder / "train", {"train.py": b"print()", "pkg/a": b"1"})
        yield Sshd(folder, host, port)
    finally:
        started.terminate()
        started.wait(60)
