"""What the controller imports of kubernetes_asyncio. Each test needs a new process."""

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


def test_the_controller_imports_no_api_models() -> None:
    """They take 0.46 s and 37 MiB. The modules are forgotten later, so Python has to report them."""
    program = "from torchrun_controller.client import slim; slim.import_library()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import torchrun_controller.app; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kubernetes_asyncio.config.kube_config" in modules
    assert "kubernetes_asyncio.client.models" not in modules
    assert "kubernetes_asyncio.client.api_client" not in modules


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
