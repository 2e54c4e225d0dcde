"""The health checks of docs/backup.md know every phase and end as the API declares."""

import re
from pathlib import Path

import pytest
import yaml

from pages import ROOT, blocks
from torchrun_api.kinds.status import PHASES, TERMINAL

PAGE = ROOT / "docs" / "backup.md"
LUA = "resource.customizations.health.torchrun.ai_TorchrunJob"


def yaml_with(word: str) -> str:
    """The text of the YAML block with this word."""
    (text,) = [
        block.text for block in blocks(PAGE) if block.language == "yaml" and word in block.text
    ]
    return text


def test_the_check_for_argo_cd_names_every_phase() -> None:
    script = yaml.safe_load(yaml_with(LUA))["data"][LUA]
    results = dict(re.findall(r"(\w+) = \"(\w+)\"", script.partition("local results")[2]))
    assert set(results) == set(PHASES)
    assert {phase for phase, health in results.items() if health != "Progressing"} == {
        *TERMINAL,
        "Suspended",
    }


@pytest.mark.parametrize("outcome", ["inProgress", "failed", "current"])
def test_the_expressions_for_flux_name_the_terminal_phases(outcome: str) -> None:
    (check,) = yaml.safe_load(yaml_with("healthCheckExprs"))["spec"]["healthCheckExprs"]
    named = set(re.findall(r"'(\w+)'", check[outcome]))
    expected = {
        "inProgress": TERMINAL,
        "failed": TERMINAL - {"Succeeded"},
        "current": {"Succeeded"},
    }
    assert named == expected[outcome]


def test_the_page_names_the_field_managers_of_the_code() -> None:
    code = "\n".join(
        Path(ROOT / path).read_text(encoding="utf-8")
        for path in (
            "controller/torchrun_controller/client/apply.py",
            "controller/torchrun_controller/controllers/admission.py",
            "plugin/kubectl_torchrun/cluster/client.py",
        )
    )
    page = PAGE.read_text(encoding="utf-8").partition("### Field managers")[2].partition("###")[0]
    named = set(re.findall(r"`((?:torchrun-controller|kubectl-torchrun)[a-z-]*)`", page))
    assert named
    assert {name for name in named if f'"{name}"' not in code} == set()
