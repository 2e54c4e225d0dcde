"""What krew reads, and the program in the plugin's archives."""

import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from pages import ROOT
from torchrun_release import python

URL = "https://releases.example.com/x/v0.2.0"


def test_the_manifest_has_an_archive_for_each_platform() -> None:
    digests = {platform: f"{number:064x}" for number, platform in enumerate(python.PLATFORMS)}
    plugin = yaml.safe_load(python.krew_manifest("0.2.0", URL, digests))
    assert plugin["kind"] == "Plugin"
    assert plugin["metadata"]["name"] == "torchrun"
    assert plugin["spec"]["version"] == "v0.2.0"
    assert [
        (entry["selector"]["matchLabels"], entry["uri"], entry["sha256"], entry["bin"])
        for entry in plugin["spec"]["platforms"]
    ] == [
        (
            {"os": platform.os, "arch": platform.arch},
            f"{URL}/kubectl-torchrun-0.2.0-{platform.os}-{platform.arch}.tar.gz",
            digest,
            "kubectl-torchrun",
        )
        for platform, digest in digests.items()
    ]


def test_the_lock_has_what_the_plugin_requires() -> None:
    project = tomllib.loads((ROOT / "plugin" / "pyproject.toml").read_text())["project"]
    locked = (ROOT / python.LOCK).read_text()
    for requirement in project["dependencies"]:
        assert f"\n{requirement.partition('>')[0]}==" in f"\n{locked}"
    named = [line for line in locked.splitlines() if "==" in line]
    assert locked.count("--hash=sha256:") >= len(named)
    assert "://" not in locked


def test_the_program_finds_its_packages_through_a_link(tmp_path: Path) -> None:
    """As krew installs it."""
    folder = tmp_path / "store"
    package = folder / "lib" / "kubectl_torchrun"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("def main():\n    print('found')\n    return 3\n")
    (folder / python.PROGRAM).write_text(python.launcher("0.2.0", URL))
    link = tmp_path / "bin"
    link.symlink_to(folder / python.PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-P", link], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "found\n")


def test_the_program_refuses_a_python_without_compiled_modules(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        python.launcher("0.2.0", URL).replace(
            "import sys", "import sys\nsys.version_info = (3, 10, 1)", 1
        )
    )
    ended = subprocess.run(
        [sys.executable, tmp_path / "old.py"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "between 3.11 and 3.14" in ended.stderr
    wheel = f"{URL}/kubectl_torchrun-0.2.0-py3-none-any.whl"
    assert f"pipx install {wheel}\n" in ended.stderr
