"""actionlint accepts the workflows."""

import subprocess
from pathlib import Path

from torchrun_cluster import binaries

WORKFLOWS = Path(__file__).parents[2] / ".github" / "workflows"


def actionlint(*files: Path) -> subprocess.CompletedProcess[str]:
    program = binaries.ensure(["actionlint"])["actionlint"]
    return subprocess.run(
        [program, "-no-color", *files], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_workflows_are_valid() -> None:
    ended = actionlint(*sorted(WORKFLOWS.glob("*.yaml")))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_wrong_one_is_not(tmp_path: Path) -> None:
    broken = tmp_path / "checks.yaml"
    broken.write_text((WORKFLOWS / "checks.yaml").read_text().replace("matrix.targets", "matrix.x"))
    assert 'property "x" is not defined' in actionlint(broken).stdout
