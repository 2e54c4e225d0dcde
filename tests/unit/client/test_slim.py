"""What the read of a kubeconfig imports. Each test needs a new process."""

import subprocess
import sys

READ = """
import asyncio, sys
from pathlib import Path
from torchrun_controller.client import Connection
{before}
path = Path(sys.argv[1])
path.write_text('''
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:1"}}}}]
users: [{{name: u, user: {{token: mine}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
''')
connection = asyncio.run(Connection.load(str(path)))
print(connection.endpoint.server, asyncio.run(connection.authorization()))
{after}
"""


def read(folder: object, before: str = "", after: str = "") -> list[str]:
    program = READ.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program, f"{folder}/config"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_kubeconfig_is_read_without_the_api_models(tmp_path: object) -> None:
    models = "any(name.startswith('kubernetes_asyncio.client.models') for name in sys.modules)"
    lines = read(tmp_path, after=f"print({models})")
    assert lines == ["http://127.0.0.1:1 Bearer mine", "False"]


def test_the_whole_library_can_be_imported_afterwards(tmp_path: object) -> None:
    after = "from kubernetes_asyncio import client, config; print(client.V1Pod(), config.__name__)"
    lines = read(tmp_path, after=after)
    assert lines[-1].endswith("kubernetes_asyncio.config")


def test_a_release_with_another_layout_is_imported_completely(tmp_path: object) -> None:
    before = (
        "from torchrun_controller.client import slim\n"
        "slim._PACKAGES = ('kubernetes_asyncio', 'kubernetes_asyncio.elsewhere')\n"
    )
    after = "print('kubernetes_asyncio.client.models' in sys.modules)"
    lines = read(tmp_path, before, after)
    assert lines == ["http://127.0.0.1:1 Bearer mine", "True"]
